"""Giving back what a dead process had.

Whoever holds the lock of the dead slot may do it, so one at a time; if that one dies too, the next one begins again,
and every step may be done twice. All blocks are looked at once:

- its holder bit is cleared;
- EVICTING in its name goes back to INDEXED: it was not past the point of no return;
- FREEING and SEALED leave the index, if they are in it, and become FREE; whether their parents count them is not known;
- MUTABLE and LOCAL become FREE.

A recount of children is asked for at the end, when all of that is FREE: one that runs meanwhile would still count it. It
is asked for in any case, because the dead process may itself have been recounting.

Living processes go on meanwhile. What they hold is not touched: a block that is in the dead one's name is held by nobody
else.
"""

from __future__ import annotations

from kvpool import layout
from kvpool.compiled import inner
from kvpool.kernels.atomics import fetch_and, fetch_or, get, load, store, swap_if
from kvpool.kernels.context import CAPACITY, DIRTY_BITS, FREE_BITS, HEADER, HOLDERS, STATE
from kvpool.kernels.free_blocks import next_life, same_life
from kvpool.kernels.index import remove
from kvpool.kernels.pause import RECLAIMED, RECLAIMING, pause
from kvpool.words import EVICTING, FREE, FREEING, INDEXED, OWNER_SHIFT, SEALED, STATE_MASK

_RECOUNT = 8 * layout.HEADER_WORDS["recount"]
_OWNER_FIELD = 0xFF << OWNER_SHIFT


@inner
def reclaim(ctx: int, dead: int) -> int:
    """Gives back what slot `dead` had; how many blocks. We hold its lock."""
    state, holders, bitmap = get(ctx + STATE), get(ctx + HOLDERS), get(ctx + FREE_BITS)
    bit = 1 << dead
    owner = dead + 1 << OWNER_SHIFT
    freed = 0
    for block in range(get(ctx + CAPACITY)):
        address = state + 8 * block
        word = load(address)
        if word & _OWNER_FIELD == owner:
            kind = word & STATE_MASK
            if kind == EVICTING:
                swap_if(address, word, same_life(word) | INDEXED)
            else:
                if kind in (SEALED, FREEING):
                    remove(ctx, block)
                swap_if(address, word, next_life(word) | FREE)
                fetch_or(bitmap + 8 * (block >> 6), 1 << (block & 63))
                if kind == FREEING:
                    fetch_or(get(ctx + DIRTY_BITS) + 8 * (block >> 6), 1 << (block & 63))
                freed += 1
            pause(ctx, RECLAIMING)
        if load(holders + 8 * block) & bit != 0:
            fetch_and(holders + 8 * block, ~bit)
    store(get(ctx + HEADER) + _RECOUNT, 1)
    pause(ctx, RECLAIMED)
    return freed
