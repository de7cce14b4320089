"""Named instructions at which a test can stop a process, to kill it there.

A process stops at step n while its slot's word `pause_at` is n, and says so in its word `step`. Only builds with
pause points (`compiled.py`) contain any of it; in others `pause` is nothing, and the compiler leaves nothing of it.
"""

from __future__ import annotations

from typing import Final

from numba import types

from kvpool import layout
from kvpool.compiled import PAUSE_POINTS, inner
from kvpool.kernels.atomics import get, load, store
from kvpool.kernels.context import SLOT

STEPS: Final[dict[str, int]] = {}
"""Number of each step, by its name."""


def _step(name: str) -> int:
    STEPS[name] = len(STEPS) + 1
    return STEPS[name]


SEEN_FREE = _step("seen_free")  # a free block is found, its state not changed yet
TAKEN = _step("taken")  # a free block is MUTABLE, its free bit still set
TAKEN_LOCAL = _step("taken_local")  # a block of the local cache is MUTABLE, the cache still lists it
HANDED_OVER = _step("handed_over")  # all blocks of an allocation are taken, none is in a table yet
PARKED = _step("parked")  # a block is LOCAL, the cache does not list it yet
FREED = _step("freed")  # a block is FREE, its free bit not set yet
FOUND = _step("found")  # an indexed block is found, the holder's bit not set yet
TOUCHED = _step("touched")  # a holder's bit is set, the state not looked at again yet
LET_GO = _step("let_go")  # a holder's bit is cleared, the request still lists the block
SEALED_ONLY = _step("sealed")  # SEALED, nothing else
COUNTED = _step("counted")  # the parent counts the child, which is not in the index yet
PLACING = _step("placing")  # an empty place of the index is found, not taken yet
PLACED = _step("placed")  # the index has the block, other entries of its key not looked for again yet
ENTERED = _step("entered")  # the index has the block, which is SEALED
HELD = _step("held")  # SEALED, in the index, holder bit set
IN_INDEX = _step("indexed")  # INDEXED, the dirty bit not set yet
CHOSEN = _step("chosen")  # an idle leaf is found, its state not changed yet
EVICTING_ONLY = _step("evicting")  # EVICTING, holders not looked at yet
FREEING_ONLY = _step("freeing")  # FREEING, the index still has the block
UNINDEXED = _step("unindexed")  # FREEING, out of the index, the parent still counts it
UNCOUNTED = _step("uncounted")  # FREEING, the parent does not count it any more
EVICTED = _step("evicted")  # in the evictor's hands, the dirty bit not set yet
IN_LINE = _step("in_line")  # a ticket is drawn, the demand bit not set yet
RECLAIMING = _step("reclaiming")  # one block of a dead process is reclaimed, others are not
RECLAIMED = _step("reclaimed")  # all blocks are reclaimed, the slot is not given back yet
RECOUNTING = _step("recounting")  # child counts are taken, none is corrected yet

if PAUSE_POINTS:
    _sleep_us = types.ExternalFunction("usleep", types.int32(types.uint32))
    _STEP_BYTE = 8 * layout.SLOT_WORDS["step"]
    _PAUSE_AT_BYTE = 8 * layout.SLOT_WORDS["pause_at"]

    @inner
    def pause(ctx: int, step: int) -> None:
        """Stops here while the slot says so."""
        slot = get(ctx + SLOT)
        if load(slot + _PAUSE_AT_BYTE) == step:
            store(slot + _STEP_BYTE, step)
            while load(slot + _PAUSE_AT_BYTE) == step:
                _sleep_us(200)
            store(slot + _STEP_BYTE, 0)

else:

    @inner
    def pause(ctx: int, step: int) -> None:
        """Nothing."""
