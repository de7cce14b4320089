"""When something was said, by the clock of whoever heard it.

A heartbeat carries the time at which its writer looked, by a clock that shares neither zero nor host with ours. What lies between
that time and its arrival here is the distance of the clocks and a delay of at least nothing. The delay varies and is now and
then close to nothing, so the least of late is taken to be the distance; what is more than that is delay.

Without that a report that was long on its way would pass for news, and a request that has ended meanwhile for one that came
after it.

Limits: a delay that never gets less than some time looks younger by that time. Clocks may drift apart: the least is that
of the last `WINDOW_S` to twice that.
"""

from __future__ import annotations

import math
from typing import Final

WINDOW_S: Final = 30.0


class WriterClock:
    """The clock of one writer, seen from here. Times are seconds."""

    __slots__ = ("_before", "_least", "_since")

    def __init__(self) -> None:
        self._since = -math.inf
        self._least = self._before = math.inf

    def read(self, told_at: float, now: float) -> float:
        """Returns when, at the latest `now`, the writer's clock showed `told_at`; for what has come just now.

        `told_at` 0: not told, which is taken to be now.
        """
        if told_at <= 0:
            return now
        if now - self._since > WINDOW_S:
            self._before, self._least, self._since = self._least, math.inf, now
        self._least = min(self._least, now - told_at)
        return min(now, told_at + min(self._least, self._before))
