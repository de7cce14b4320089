"""Taking the dirty bits of a region: which blocks came into the index, or left it, since the last time.

Whoever makes a block INDEXED, or ends that, sets the block's dirty bit afterwards. Any number of processes set, one clears: the
one that publishes. All run at the same time, without a lock:

    setter   S1  state[b] = new word            taker   T1  bits = exchange(dirty[i], 0)
             S2  dirty[i] |= bit, atomically            T2  for each bit: read state[b]

- The word is cleared BEFORE the states are read. Were it the other way round, a change after the reading and before the
  clearing would lose its bit without having been seen.
- T1 and S2 are one atomic step each, so one is before the other: T1 after S2 has the bit, and T2 sees the new word or a
  later one; T1 before S2 leaves the bit for the next taking. Setters do not lose each other's bits either.

So a bit gets lost only by a death: of a setter between S1 and S2, or of the taker after T1. For those there is the
publisher's comparison of all words, at its beginning and every few hundred milliseconds.

Limits: a second taker would keep from the first what it takes. The first call compiles, about a second, unless numba's cache
has it. `dirty` must be 8-byte aligned u64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def _exchange(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = cgutils.get_item_pointer(
            context, builder, signature.args[0], view, [arguments[1]], wraparound=False, boundscheck=False
        )
        return builder.atomic_rmw("xchg", pointer, arguments[2], "seq_cst")

    return types.uint64(array, types.intp, types.uint64), generate


@njit(cache=True)
def _take(dirty: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int64]) -> int:
    count = 0
    for word in range(len(dirty)):
        if dirty[word] == 0:
            continue
        bits = _exchange(dirty, word, np.uint64(0))
        for bit in range(64):
            if bits >> np.uint64(bit) & np.uint64(1) and count < len(blocks):
                blocks[count] = word * 64 + bit
                count += 1
    return count


def take(dirty: npt.NDArray[np.uint64], room: npt.NDArray[np.int64]) -> list[int]:
    """Clears `dirty` and returns the blocks whose bits were set. `room` has one int64 per block and is overwritten."""
    count = _take(dirty, room)
    blocks: list[int] = room[:count].tolist()
    return blocks
