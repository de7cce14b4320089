"""The clock of a replay."""

from __future__ import annotations


class SimulatedTime:
    """Seconds since the replay began. Only goes forward."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Returns the time."""
        return self._now

    def move_to(self, now: float) -> None:
        """It is `now`, or later if it was later already."""
        self._now = max(self._now, now)
