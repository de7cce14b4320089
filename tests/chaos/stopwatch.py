"""How long each call of the pool took its caller: on the clock, and of the thread's own processor time.

The clock also counts while the machine runs somebody else, so on a busy machine it says little about us. Processor time
is what a call spent working or spinning: it would grow if a process spun until another one got on.

Times are counted in buckets, eight to each doubling, so those of many workers can be added up.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, ParamSpec, TypeVar

_EACH: Final = 8
KINDS: Final = ("clock", "busy")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Stopwatch:
    """Times calls."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}

    def __call__(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **more: Arguments.kwargs
    ) -> Result:
        """Calls `function` and times it."""
        clock, busy = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return function(*args, **more)
        finally:
            self._note("busy", time.thread_time_ns() - busy)
            self._note("clock", time.perf_counter_ns() - clock)

    def _note(self, kind: str, duration_ns: int) -> None:
        self._counts[kind][math.ceil(_EACH * math.log2(max(1, duration_ns)))] += 1

    def report(self) -> dict[str, dict[int, int]]:
        """What was counted since the last report, by kind and bucket."""
        counts, self._counts = self._counts, {kind: Counter() for kind in KINDS}
        return {kind: dict(counted) for kind, counted in counts.items()}


def spread_us(counts: Iterable[dict[str, int]]) -> tuple[float, float, float]:
    """The p50, p99 and maximum of all of them together, in microseconds, rounded up by up to a tenth."""
    total: Counter[int] = Counter()
    for counted in counts:
        total.update({int(bucket): count for bucket, count in counted.items()})
    ordered = sorted(total.elements())
    if not ordered:
        return 0.0, 0.0, 0.0
    places = (len(ordered) // 2, len(ordered) * 99 // 100, len(ordered) - 1)
    p50, p99, most = (2.0 ** (ordered[place] / _EACH) / 1000 for place in places)
    return p50, p99, most
