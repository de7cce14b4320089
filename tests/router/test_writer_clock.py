from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.writer_clock import WINDOW_S, WriterClock


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0.001, WINDOW_S / 2), st.floats(0.0, 5.0)), min_size=1, max_size=40),
)
def test_what_was_said_is_never_younger_than_the_least_delay_and_never_in_the_future(
    distance_s: float, beats: list[tuple[float, float]]
) -> None:
    """Over any distance of the clocks: late by what the delay was more than the least of those heard of in the window."""
    clock, looked_at, heard_at = WriterClock(), 2e6, 0.0
    delays: list[tuple[float, float]] = []
    for pause_s, delay_s in beats:
        looked_at += pause_s
        heard_at = max(heard_at, looked_at + delay_s)  # they come in order
        delays.append((heard_at, heard_at - looked_at))
        found = clock.read(looked_at + distance_s, heard_at)
        near = min(delay for at, delay in delays if at >= heard_at - WINDOW_S)
        least = min(delay for _, delay in delays)
        assert found <= heard_at
        assert looked_at + least - 1e-6 <= found <= looked_at + near + 1e-6


def test_clocks_that_drift_apart_are_followed() -> None:
    clock = WriterClock()
    for step in range(10_000):
        now = 100.0 + 0.2 * step
        assert clock.read(50.0 + 0.2 * step * 0.9999, now) == pytest.approx(now, abs=(2 * WINDOW_S + 1) * 0.0001)


def test_a_writer_that_does_not_tell_is_believed_to_speak_of_now() -> None:
    clock = WriterClock()
    assert clock.read(5.0, 10.0) == 10.0
    assert clock.read(0.0, 11.0) == 11.0
    assert clock.read(7.0, 12.5) == 12.0
