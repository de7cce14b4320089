"""What deaths leave behind that is nobody's block: hints that are wrong, and counts that are too high.

Free bits. A block that is FREE without a bit gets it back; a bit of a block that is not FREE is cleared. Both race with
processes that take and give blocks; a bit that comes out wrong is put right the next time.

Child counts. A death between counting a child and publishing it, or between un-indexing a child and counting it off, leaves
a parent with too many children: it could never be evicted. So the children are counted anew. Every change of a count also
changes its version, so a count is only corrected if nothing changed since before we looked; and whatever counts itself in
later has its parent word and SEALED state written before. So a count never becomes too low. It may stay too high: where it
changed meanwhile, or where a block was on its way in or out and was found but is not counted. Then another recount is asked
for.
"""

from __future__ import annotations

from kvpool import layout
from kvpool.compiled import inner
from kvpool.kernels.atomics import fetch_and, fetch_or, get, load, put, store, swap_if
from kvpool.kernels.context import BITMAP_WORDS, CAPACITY, CHILDREN, FREE_BITS, HEADER, PARENT, SCRATCH, STATE
from kvpool.kernels.counting import RECOUNTED, RESTORED_BITS, count
from kvpool.kernels.eviction import CHILD_COUNT
from kvpool.kernels.pause import RECOUNTING, pause
from kvpool.words import FREE, FREEING, PARENT_MASK, SEALED, STATE_MASK

_RECOUNT = 8 * layout.HEADER_WORDS["recount"]
_VERSION = 1 << 32


@inner
def restore_free_bits(ctx: int) -> int:
    """Sets the free bits that are missing; how many. Clears those that are wrong."""
    state, bitmap, capacity = get(ctx + STATE), get(ctx + FREE_BITS), get(ctx + CAPACITY)
    restored = 0
    for word in range(get(ctx + BITMAP_WORDS)):
        bits = load(bitmap + 8 * word)
        missing, wrong = 0, 0
        for place in range(min(64, capacity - 64 * word)):
            is_free = load(state + 8 * (64 * word + place)) & STATE_MASK == FREE
            bit = 1 << place
            if is_free and bits & bit == 0:
                missing |= bit
                restored += 1
            elif not is_free and bits & bit != 0:
                wrong |= bit
        if missing != 0:
            fetch_or(bitmap + 8 * word, missing)
        if wrong != 0:
            fetch_and(bitmap + 8 * word, ~wrong)
    count(ctx, RESTORED_BITS, restored)
    return restored


@inner
def recount_children(ctx: int) -> int:
    """Corrects the child counts that are too high; how many."""
    state, parents, children = get(ctx + STATE), get(ctx + PARENT), get(ctx + CHILDREN)
    capacity = get(ctx + CAPACITY)
    before = get(ctx + SCRATCH)
    found = before + 8 * capacity
    store(get(ctx + HEADER) + _RECOUNT, 0)
    for block in range(capacity):
        put(before + 8 * block, load(children + 8 * block))
        put(found + 8 * block, 0)
    unsure = False
    for block in range(capacity):
        kind = load(state + 8 * block) & STATE_MASK
        if kind >= SEALED:
            parent = (load(parents + 8 * block) & PARENT_MASK) - 1
            if 0 <= parent < capacity:
                put(found + 8 * parent, get(found + 8 * parent) + 1)
                unsure |= kind in (SEALED, FREEING)
    pause(ctx, RECOUNTING)
    corrected = 0
    for block in range(capacity):
        word, right = get(before + 8 * block), get(found + 8 * block)
        if word & CHILD_COUNT > right and swap_if(children + 8 * block, word, (word & ~CHILD_COUNT) + _VERSION | right):
            corrected += 1
        elif load(children + 8 * block) != word:
            unsure = True
    if unsure:
        store(get(ctx + HEADER) + _RECOUNT, 1)
    count(ctx, RECOUNTED, corrected)
    return corrected
