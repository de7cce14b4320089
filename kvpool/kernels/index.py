"""From a key to the block that has it: a table of 64-bit entries inside the region.

An entry is `tag << 32 | block + 1`. The key's bytes 0..7 say where its window begins, bytes 8..11 are the tag; the full
key is compared with the one stored at the block. An entry may stand anywhere in the key's window of 32 and never moves;
so adding one is a compare-and-swap of an empty place, removing it one back to empty, and a look-up, which reads the
whole window, cannot miss what is there. There are at least four places a block, so a window is never full in practice
(less than one in 10^9); a block that finds it full stays out of the index.

Two processes may add one key at the same time. Each looks at the window again after adding: whoever sees another entry
with its key takes its own out again. At least one of the two sees the other; if both do, neither is in, and the tidy
pass tries again. An entry stands only while its block is SEALED, INDEXED, EVICTING or FREEING, so the key at the block
is that of the entry.
"""

from __future__ import annotations

from typing import Final

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, load, swap_if
from kvpool.kernels.context import INDEX, INDEX_MASK, KEY
from kvpool.kernels.pause import PLACED, PLACING, pause
from kvpool.layout import WINDOW

NOT_FOUND: Final = -1
ADDED: Final = 1
CONTENDED: Final = 2
FULL: Final = 3
_LOW: Final = 0xFFFFFFFF


@inner
def _holder_of(ctx: int, entry: int, first: int, second: int) -> int:
    """The block of `entry` if its key is (first, second), else NOT_FOUND."""
    if entry == 0 or entry >> 32 & _LOW != second & _LOW:
        return NOT_FOUND
    block = (entry & _LOW) - 1
    key = get(ctx + KEY) + 16 * block
    return block if load(key) == first and load(key + 8) == second else NOT_FOUND


@inner
def find(ctx: int, first: int, second: int) -> int:
    """The block that is entered with the key (first, second), its two words, or NOT_FOUND. Says nothing of its state."""
    index, mask = get(ctx + INDEX), get(ctx + INDEX_MASK)
    for step in range(WINDOW):
        entry = load(index + 8 * (first + step & mask))
        block = _holder_of(ctx, entry, first, second)
        if block != NOT_FOUND:
            return block
    return NOT_FOUND


@inner
def _add_once(ctx: int, block: int, first: int, entry: int, second: int) -> int:
    """Adds `entry` at the first empty place; its place, or minus ADDED, CONTENDED, FULL as in `add`."""
    index, mask = get(ctx + INDEX), get(ctx + INDEX_MASK)
    place = NOT_FOUND
    for step in range(WINDOW):
        known = load(index + 8 * (first + step & mask))
        if known == 0:
            if place == NOT_FOUND:
                place = first + step & mask
        elif _holder_of(ctx, known, first, second) != NOT_FOUND:
            return -CONTENDED
    if place == NOT_FOUND:
        return -FULL
    pause(ctx, PLACING)
    return place if swap_if(index + 8 * place, 0, entry) else -ADDED


@inner
def add(ctx: int, block: int) -> int:
    """Enters `block` under the key stored at it. ADDED, or CONTENDED (another one has the key, or may), or FULL."""
    index, mask = get(ctx + INDEX), get(ctx + INDEX_MASK)
    key = get(ctx + KEY) + 16 * block
    first, second = get(key), get(key + 8)
    entry = (second & _LOW) << 32 | block + 1
    place = -ADDED
    for _ in range(8):  # places that others took between our look and our swap
        place = _add_once(ctx, block, first, entry, second)
        if place != -ADDED:
            break
    if place < 0:
        return FULL if place == -FULL else CONTENDED
    pause(ctx, PLACED)
    for step in range(WINDOW):
        other = first + step & mask
        if other != place and _holder_of(ctx, load(index + 8 * other), first, second) != NOT_FOUND:
            swap_if(index + 8 * place, entry, 0)
            return CONTENDED
    return ADDED


@inner
def remove(ctx: int, block: int) -> bool:
    """Takes `block` out; False when it is not in, as after a death on the way."""
    index, mask = get(ctx + INDEX), get(ctx + INDEX_MASK)
    key = get(ctx + KEY) + 16 * block
    first, second = get(key), get(key + 8)
    entry = (second & _LOW) << 32 | block + 1
    for step in range(WINDOW):
        address = index + 8 * (first + step & mask)
        if load(address) == entry:
            return swap_if(address, entry, 0)
    return False
