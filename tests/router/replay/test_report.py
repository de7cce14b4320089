"""Figures of a run, medians over seeds, rows of the table."""

from __future__ import annotations

import numpy as np
import pytest

from router.replay.report import HEAD, Figures, figures, medians, rows, setting
from router.replay.simulation import Outcome, Plan
from tests.router.replay.traces import BLOCK, trace_of

# Three requests of 19 tokens; the second and the third could have 16 of the first.
TRACE = trace_of([[1, 2], [1, 2], [1, 2]])
PLAN = Plan("cost", 2, 1, None, 0.05, 0, 2.0)


def _outcome(**changes: object) -> Outcome:
    values: dict[str, object] = {
        "replica": np.array([0, 1, 0]),
        "cached_tokens": np.array([0, 0, 2 * BLOCK]),
        "ttft_s": np.array([1.0, 2.0, 3.0]),
        "latency_s": np.array([2.0, 3.0, 4.0]),
        "computed_tokens": np.array([22, 19]),
        "decide_s": np.array([1e-4, 2e-4, 3e-4]),
        "decide_cpu_s": np.array([1e-4, 1e-4, 1e-4]),
        "evicted_blocks": 0,
        "router_totals": {"phantom_tokens": 5},
        "fallbacks": 0,
    }
    return Outcome(**(values | changes))  # type: ignore[arg-type]


def _run(**changes: object) -> Figures:
    return figures(PLAN, 1.0, "none", TRACE, _outcome(**changes))


def test_figures_are_what_they_say() -> None:
    run = _run()
    assert run["hit"] == pytest.approx(16 / 57)
    assert run["ttft_p50_s"] == 2.0
    assert run["imbalance"] == pytest.approx(22 / 20.5)
    assert run["cov"] == pytest.approx(1.5 / 20.5)
    assert run["duplicate_prefill_tokens"] == 16
    assert run["phantom_tokens"] == 5
    assert run["hit_of_one_cache"] == pytest.approx(32 / 57)
    assert run["decide_p99_us"] == pytest.approx(298)
    assert run["decide_cpu_p99_us"] == pytest.approx(100)


def test_what_was_refused_is_in_no_figure_but_rejects() -> None:
    nan = float("nan")
    run = _run(
        replica=np.array([0, -1, 0]),
        cached_tokens=np.array([0, -1, 16]),
        ttft_s=np.array([1.0, nan, 3.0]),
    )
    assert run["rejects"] == 1
    assert run["hit"] == pytest.approx(16 / 38)
    assert run["ttft_p99_s"] <= 3.0
    nobody = _run(replica=np.full(3, -1), ttft_s=np.full(3, nan), computed_tokens=np.zeros(2))
    assert nobody["ttft_p95_s"] is None
    assert nobody["hit"] == 0.0
    assert nobody["rejects"] == 3


def test_each_figure_is_the_median_of_its_own() -> None:
    runs = [_run(ttft_s=np.array([t, t, t]), evicted_blocks=n) for t, n in ((1.0, 9), (5.0, 1), (2.0, 4))]
    told = medians(runs)
    assert told["ttft_p50_s"] == 2.0
    assert told["evicted_blocks"] == 4
    assert told["policy"] == "cost"
    assert told["pool_tokens"] is None
    assert told["seeds"] == 3
    assert isinstance(told["rejects"], int)


def test_rows_fit_their_head_and_the_setting_says_how_requests_arrive() -> None:
    told = medians([_run()])
    for row in rows([told, told | {"ttft_p95_s": None}]):
        assert len(row) == len(HEAD)
    assert "spread evenly" in setting(told)
    assert "keep everything" in setting(told)
    assert "pools of 4,096 tokens" in setting(told | {"pool_tokens": 4096, "control": "no-sharing"})
