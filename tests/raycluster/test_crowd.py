"""A small crowd of streams through the whole application: the short version of `tests/soak/test_streams.py`."""

from __future__ import annotations

import pytest

from tests.loads.crowd import Crowd, run_crowd
from tests.loads.storm import debug_state, settled
from tests.raycluster.conftest import ADMIN_KEY, Served

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


async def test_streams_that_are_left_read_slowly_or_asked_for_wrongly_leave_nothing_behind(served: Served) -> None:
    before = debug_state(served.url, ADMIN_KEY)
    outcomes = await run_crowd(Crowd(served.url, served.model, clients=60, seconds=15, slow_answer=200))
    assert set(outcomes.results) == {"answered", "answered slowly", "left", "refused"}
    assert outcomes.checks > 3
    assert outcomes.ill == []
    settled(served.url, ADMIN_KEY, before, within_s=30)
