from __future__ import annotations

import pytest

from tests.router.views import route, view


@pytest.mark.parametrize(
    ("cached", "queued", "running", "wanted"),
    [
        ([960, 0], [0, 0], [0, 0], "r0"),
        # (1000 - 960 + 400) x 1 against 1000 x 1, and with 1,000 tokens more.
        ([960, 0], [400, 0], [0, 0], "r0"),
        ([960, 0], [1400, 0], [0, 0], "r1"),
        # 40 x 25 against 1000 x 1: equal at 25, so one more decode decides.
        ([960, 0], [0, 0], [23, 0], "r0"),
        ([960, 0], [0, 0], [25, 0], "r1"),
    ],
)
def test_tokens_to_compute_times_requests(
    cached: list[int], queued: list[int], running: list[int], wanted: str
) -> None:
    assert route(view(cached_tokens=cached, queued_tokens=queued, running=running), "lmetric").replica_id == wanted


def test_its_terms_make_its_score() -> None:
    decision = route(view(cached_tokens=[600, 0], queued_tokens=[50, 70], running=[3, 0]), "lmetric")
    assert decision.terms["prefill_tokens"].tolist() == [450.0, 1070.0]
    assert decision.terms["requests"].tolist() == [4.0, 1.0]
    assert decision.score.tolist() == [1800.0, 1070.0]


def test_what_is_cached_wherever_there_is_nothing_to_compute_makes_equals() -> None:
    seen = view(cached_tokens=[1000, 1000], running=[0, 50])
    assert {route(seen, "lmetric", seed=seed).replica_id for seed in range(20)} == {"r0", "r1"}
