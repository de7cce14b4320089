"""How long each call of the pool took its caller: on the clock, and of the thread's own processor time.

The clock also counts while the machine runs somebody else, so on a busy machine it says little about us. Processor time
is what a call spent working or spinning: it would grow if a process spun until another one got on.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Stopwatch:
    """Times calls, in nanoseconds."""

    def __init__(self) -> None:
        self._clock = array("q")
        self._busy = array("q")

    def __call__(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **more: Arguments.kwargs
    ) -> Result:
        """Calls `function` and times it."""
        clock, busy = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return function(*args, **more)
        finally:
            self._busy.append(time.thread_time_ns() - busy)
            self._clock.append(time.perf_counter_ns() - clock)

    def report(self) -> dict[str, list[float]]:
        """[p50, p99, max] in microseconds of `clock` and `busy`; and the number of `calls`."""
        return {"calls": [len(self._clock)], "clock_us": _spread(self._clock), "busy_us": _spread(self._busy)}


def _spread(times: array[int]) -> list[float]:
    if not times:
        return [0.0, 0.0, 0.0]
    ordered = sorted(times)
    return [ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1000 for share in (0.5, 0.99, 1.0)]
