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

_NAMES = (
    "seen_free",  # a free block is found, its state not changed yet
    "taken",  # a free block is MUTABLE, its free bit still set
    "taken_local",  # a block of the local cache is MUTABLE, the cache still lists it
    "handed_over",  # all blocks of an allocation are taken, none is in a table yet
    "parked",  # a block is LOCAL, the cache does not list it yet
    "freed",  # a block is FREE, its free bit not set yet
    "found",  # an indexed block is found, the holder's bit not set yet
    "touched",  # a holder's bit is set, the state not looked at again yet
    "let_go",  # a holder's bit is cleared, the request still lists the block
    "sealed",  # SEALED, nothing else
    "counted",  # the parent counts the child, which is not in the index yet
    "placing",  # an empty place of the index is found, not taken yet
    "placed",  # the index has the block, other entries of its key not looked for again yet
    "entered",  # the index has the block, which is SEALED
    "held",  # SEALED, in the index, holder bit set
    "indexed",  # INDEXED, the dirty bit not set yet
    "chosen",  # an idle leaf is found, its state not changed yet
    "evicting",  # EVICTING, holders not looked at yet
    "freeing",  # FREEING, the index still has the block
    "unindexed",  # FREEING, out of the index, the parent still counts it
    "uncounted",  # FREEING, the parent does not count it any more
    "evicted",  # in the evictor's hands, the dirty bit not set yet
    "in_line",  # a ticket is drawn, the demand bit not set yet
    "reclaiming",  # one block of a dead process is reclaimed, others are not
    "reclaimed",  # all blocks are reclaimed, the slot is not given back yet
    "recounting",  # child counts are taken, none is corrected yet
)

STEPS: Final[dict[str, int]] = {name: number for number, name in enumerate(_NAMES, 1)}
"""Number of each step."""

(
    SEEN_FREE,
    TAKEN,
    TAKEN_LOCAL,
    HANDED_OVER,
    PARKED,
    FREED,
    FOUND,
    TOUCHED,
    LET_GO,
    SEALED_ONLY,
    COUNTED,
    PLACING,
    PLACED,
    ENTERED,
    HELD,
    IN_INDEX,
    CHOSEN,
    EVICTING_ONLY,
    FREEING_ONLY,
    UNINDEXED,
    UNCOUNTED,
    EVICTED,
    IN_LINE,
    RECLAIMING,
    RECLAIMED,
    RECOUNTING,
) = STEPS.values()

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
