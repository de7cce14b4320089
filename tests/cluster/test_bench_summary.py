"""Numbers of a run."""

from __future__ import annotations

import pytest

from cluster.bench.replay import Outcome
from cluster.bench.summary import by_replica, percentile, summarise


def test_sums_rates_and_hit() -> None:
    good = [
        Outcome("", ttft_s=i / 10, total_s=i, prompt_tokens=100, cached_tokens=60, completion_tokens=8) for i in (1, 2)
    ]
    report = summarise([*good, Outcome("boom"), Outcome("boom")], 4.0)
    assert report["requests"] == 4
    assert report["errors"] == 2
    assert report["rps"] == 0.5
    assert report["hit"] == 0.6
    assert report["out_tok_s"] == 4.0
    assert report["first_errors"] == ["2 x boom"]
    assert (report["ttft_p50_s"], report["ttft_p95_s"]) == (0.1, 0.2)


def test_nothing_succeeded() -> None:
    report = summarise([Outcome("x")], 1.0)
    assert report["ttft_p50_s"] is None
    assert report["hit"] == 0.0


def test_sums_for_each_replica_that_answered() -> None:
    def answered(replica: str, cached: int, error: str = "") -> Outcome:
        return Outcome(error, prompt_tokens=10, cached_tokens=cached, replica=replica)

    outcomes = [answered("b", 1), answered("a", 2), answered("b", 3), answered("a", 9, "died"), answered("", 4)]
    assert by_replica(outcomes) == [
        {"replica_id": "a", "requests": 1, "cached_tokens": 2, "prompt_tokens": 10},
        {"replica_id": "b", "requests": 2, "cached_tokens": 4, "prompt_tokens": 20},
    ]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.95, 95), (1.0, 100), (0.001, 1)])
def test_percentile_is_a_value_that_occurred(share: float, expected: float) -> None:
    assert percentile([float(i) for i in range(1, 101)], share) == expected
