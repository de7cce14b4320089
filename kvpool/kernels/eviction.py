"""Which cached block goes first, and how it goes.

Only idle indexed LEAVES may go: INDEXED, held by no slot, no indexed child. So the index stays prefix-closed, and a
prefix loses its tail first. Among leaves the one unused for the longest goes first; at equal times the deeper one. When a
leaf goes, its parent may become a leaf and is a candidate at once.

Candidates wait in a heap, private to the process, of (last use, -depth, block, generation). It is made by one look at all
blocks and used until it is empty: what becomes idle meanwhile is younger than all in it (times are of one clock for all
processes), so the order is right. A candidate is looked at again when its turn comes; one that lives another life, was
used since, or is no idle leaf any more is passed over. Leaves that other processes' evictions bring about are seen when
the next heap is made.

Going: INDEXED -> EVICTING, in our name; look at the holders, and then at the children (a child is only added by a holder of
its parent, so this order misses none): anyone there, and it is put back. Else FREEING, the point of no return; out of
the index; the parent's child count falls (after that, so a death in between leaves it too high, never too low); then
FREE, or straight into our hands, in a new life.
"""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import fetch_add, fetch_or, get, load, put, store, swap_if
from kvpool.kernels.context import (
    BORN,
    CAPACITY,
    CHILDREN,
    DIRTY_BITS,
    HEAP,
    HEAP_COUNT,
    HOLDERS,
    LAST_USE,
    MINE,
    PARENT,
    STATE,
)
from kvpool.kernels.counting import (
    EVICTIONS_IDLE,
    IDLE_BEFORE_EVICT,
    LIFETIME,
    bucket_of,
    count,
    observe,
    tried,
)
from kvpool.kernels.free_blocks import next_life, same_life, set_free, set_free_bits
from kvpool.kernels.index import NOT_FOUND, remove
from kvpool.kernels.pause import CHOSEN, EVICTED, EVICTING_ONLY, FREEING_ONLY, UNCOUNTED, UNINDEXED, pause
from kvpool.words import DEPTH_SHIFT, EVICTING, FREEING, GENERATION_SHIFT, INDEXED, MUTABLE, PARENT_MASK, STATE_MASK

ONE_CHILD = 1 + (1 << 32)
"""What a child adds to its parent's word: one to the count, one to the version."""
_LESS_ONE_CHILD = (1 << 32) - 1
CHILD_COUNT = 0xFFFFFFFF
_ENTRY = 32  # bytes: last use, -depth, block, generation


@inner
def is_idle(ctx: int, block: int) -> bool:
    """Whether `block` is INDEXED and nobody holds it."""
    return load(get(ctx + STATE) + 8 * block) & STATE_MASK == INDEXED and load(get(ctx + HOLDERS) + 8 * block) == 0


@inner
def is_idle_leaf(ctx: int, block: int) -> bool:
    """Whether `block` may be evicted now."""
    return is_idle(ctx, block) and load(get(ctx + CHILDREN) + 8 * block) & CHILD_COUNT == 0


@inner
def count_idle(ctx: int) -> int:
    """How many blocks eviction could free, one after another: all idle ones, as a holder of a block holds its parents."""
    idle = 0
    for block in range(get(ctx + CAPACITY)):
        if is_idle(ctx, block):
            idle += 1
    return idle


@inner
def _comes_before(one: int, other: int) -> bool:
    if get(one) != get(other):
        return get(one) < get(other)
    if get(one + 8) != get(other + 8):
        return get(one + 8) < get(other + 8)
    return get(one + 16) < get(other + 16)


@inner
def _swap(one: int, other: int) -> None:
    for offset in range(0, _ENTRY, 8):
        kept = get(one + offset)
        put(one + offset, get(other + offset))
        put(other + offset, kept)


@inner
def _sink(heap: int, size: int, place: int) -> None:
    while True:
        least = place
        for child in range(2 * place + 1, min(2 * place + 3, size)):
            if _comes_before(heap + _ENTRY * child, heap + _ENTRY * least):
                least = child
        if least == place:
            return
        _swap(heap + _ENTRY * place, heap + _ENTRY * least)
        place = least


@inner
def _rise(heap: int, place: int) -> None:
    while place > 0:
        above = place - 1 >> 1
        if not _comes_before(heap + _ENTRY * place, heap + _ENTRY * above):
            return
        _swap(heap + _ENTRY * place, heap + _ENTRY * above)
        place = above


@inner
def _append(ctx: int, size: int, block: int) -> None:
    entry = get(ctx + HEAP) + _ENTRY * size
    put(entry, load(get(ctx + LAST_USE) + 8 * block))
    put(entry + 8, -(get(get(ctx + PARENT) + 8 * block) >> DEPTH_SHIFT))
    put(entry + 16, block)
    put(entry + 24, load(get(ctx + STATE) + 8 * block) >> GENERATION_SHIFT)


@inner
def _push(ctx: int, block: int) -> None:
    size = get(ctx + HEAP_COUNT)
    if size < get(ctx + CAPACITY):
        _append(ctx, size, block)
        put(ctx + HEAP_COUNT, size + 1)
        _rise(get(ctx + HEAP), size)


@inner
def _make_heap(ctx: int) -> int:
    """Fills the heap with all idle leaves; how many."""
    size = 0
    for block in range(get(ctx + CAPACITY)):
        if is_idle_leaf(ctx, block):
            _append(ctx, size, block)
            size += 1
    heap = get(ctx + HEAP)
    for place in range((size >> 1) - 1, -1, -1):
        _sink(heap, size, place)
    put(ctx + HEAP_COUNT, size)
    return size


@inner
def _next(ctx: int) -> int:
    """The oldest candidate, off the heap, if it still is one; else NOT_FOUND."""
    heap = get(ctx + HEAP)
    last_use, block, generation = get(heap), get(heap + 16), get(heap + 24)
    size = get(ctx + HEAP_COUNT) - 1
    put(ctx + HEAP_COUNT, size)
    if size > 0:
        _swap(heap, heap + _ENTRY * size)
        _sink(heap, size, 0)
    if load(get(ctx + STATE) + 8 * block) >> GENERATION_SHIFT != generation or not is_idle_leaf(ctx, block):
        return NOT_FOUND
    return block if load(get(ctx + LAST_USE) + 8 * block) == last_use else NOT_FOUND


@inner
def _seize(ctx: int, block: int) -> bool:
    """Brings an idle leaf into FREEING in our name; False when somebody came to hold it, or took it first."""
    address = get(ctx + STATE) + 8 * block
    word = load(address)
    if word & STATE_MASK != INDEXED:
        return False
    pause(ctx, CHOSEN)
    going = same_life(word) | get(ctx + MINE)
    if not swap_if(address, word, going | EVICTING):
        tried(ctx, 1, 1)
        return False
    pause(ctx, EVICTING_ONLY)
    if load(get(ctx + HOLDERS) + 8 * block) != 0 or load(get(ctx + CHILDREN) + 8 * block) & CHILD_COUNT != 0:
        swap_if(address, going | EVICTING, word)
        tried(ctx, 2, 1)
        return False
    swap_if(address, going | EVICTING, going | FREEING)
    tried(ctx, 2, 0)
    return True


@inner
def _evict(ctx: int, block: int, keep: bool, now: int) -> bool:
    """Evicts an idle leaf: it becomes MUTABLE and ours with `keep`, else FREE. False when it is none any more."""
    if not _seize(ctx, block):
        return False
    pause(ctx, FREEING_ONLY)
    born, last_use = get(get(ctx + BORN) + 8 * block), get(get(ctx + LAST_USE) + 8 * block)
    remove(ctx, block)
    pause(ctx, UNINDEXED)
    parent = (get(get(ctx + PARENT) + 8 * block) & PARENT_MASK) - 1
    if parent >= 0:
        fetch_add(get(ctx + CHILDREN) + 8 * parent, _LESS_ONE_CHILD)
        pause(ctx, UNCOUNTED)
        if is_idle_leaf(ctx, parent):
            _push(ctx, parent)
    if keep:
        address = get(ctx + STATE) + 8 * block
        store(address, next_life(load(address)) | get(ctx + MINE) | MUTABLE)
    else:
        set_free(ctx, block)
        set_free_bits(ctx, block >> 6, 1 << (block & 63))
    pause(ctx, EVICTED)
    fetch_or(get(ctx + DIRTY_BITS) + 8 * (block >> 6), 1 << (block & 63))
    count(ctx, EVICTIONS_IDLE, 1)
    observe(ctx, LIFETIME, bucket_of(now - born), 1)
    observe(ctx, IDLE_BEFORE_EVICT, bucket_of(now - last_use), 1)
    return True


@inner
def evict_one(ctx: int, keep: bool, now: int) -> int:
    """Evicts the oldest idle leaf; the block, MUTABLE and ours with `keep`, else FREE. NOT_FOUND when there is none."""
    fresh = False
    while True:
        if get(ctx + HEAP_COUNT) == 0:
            if fresh or _make_heap(ctx) == 0:
                return NOT_FOUND
            fresh = True
        block = _next(ctx)
        if block != NOT_FOUND and _evict(ctx, block, keep, now):
            return block
