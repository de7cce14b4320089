"""The time inside a kernel: what the caller says, or the system's monotonic clock, which is the same for all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import types

from kvpool.compiled import inner
from kvpool.kernels.atomics import get
from kvpool.kernels.context import CLOCK_ROOM

READ_IT: Final = -1
"""Given as a time: read the clock. Costs a tenth of reading it in Python."""
_MONOTONIC: Final = 1
_clock_gettime: Callable[[int, int], int] = types.ExternalFunction(
    "clock_gettime", types.int32(types.int32, types.int64)
)


@inner
def told(ctx: int, now: int) -> int:
    """Monotonic nanoseconds: `now`, or the clock's for READ_IT."""
    if now != READ_IT:
        return now
    room = get(ctx + CLOCK_ROOM)
    _clock_gettime(_MONOTONIC, room)
    return get(room) * 1_000_000_000 + get(room + 8)
