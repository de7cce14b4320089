"""Small versions of the long runs: disconnects, exactness, and the counters behind them, through the whole application."""

from __future__ import annotations

import pytest

from tests.loads.exactness import compare, make_cases
from tests.loads.storm import Storm, debug_state, run_storm, settled
from tests.raycluster.conftest import ADMIN_KEY, Served

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


async def test_clients_that_leave_at_random_points_leave_nothing_behind(served: Served) -> None:
    before = debug_state(served.url, ADMIN_KEY)
    results = await run_storm(Storm(served.url, served.model, requests=60, longest=400, leave_within_s=0.3))
    answered = results.pop("answered")
    left = results.pop("left by the clock", 0) + results.pop("left while streaming", 0)
    assert not results
    assert answered + left == 60
    assert left >= 5
    settled(served.url, ADMIN_KEY, before)


async def test_tokens_equal_those_of_generate_batched_chunked_and_cached(served: Served) -> None:
    cases = make_cases(served.model_dir, count=10, longest=400, new_tokens=24)
    cached = 0
    for _ in range(2):
        mismatches, _, cached = await compare(served.url, served.model, cases, served.model_dir)
        assert mismatches == []
    # Not all of it: a request leaves the replica that has its prefix while that one's queue is long.
    assert cached >= sum((len(case.prompt) - 1) // 16 * 16 for case in cases) / 2
