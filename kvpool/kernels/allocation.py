"""Blocks for a request, all or nothing: local cache, then free blocks, then eviction of idle leaves.

Whether eviction can give enough is known before the first block is evicted, because every idle indexed block can be: so a
request that does not fit costs nobody its cache. What was taken before that is given back.
"""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, put
from kvpool.kernels.claims import may_take, note_held
from kvpool.kernels.context import HELD, REFS, TABLE_BLOCKS, TABLE_COUNT
from kvpool.kernels.counting import (
    ALLOCATED_EVICT,
    ALLOCATED_FREE,
    ALLOCATED_LOCAL,
    ALLOCATIONS,
    FAILURES_FULL,
    FAILURES_OWED,
    PEAK_REQUESTED,
    PEAK_USED,
    REQUESTED,
    USED_SUM,
    count,
    count_peak,
)
from kvpool.kernels.eviction import count_idle, evict_one
from kvpool.kernels.free_blocks import hand_over, park, set_free, set_free_bits, take_free, take_local, take_unlisted
from kvpool.kernels.index import NOT_FOUND
from kvpool.kernels.pause import HANDED_OVER, pause
from kvpool.kernels.repair import recount_children


@inner
def _undo(ctx: int, out: int, from_local: int, taken: int) -> None:
    """Gives `taken` blocks back to where they came from: the first `from_local` to the local cache, the others to all."""
    for place in range(taken - 1, -1, -1):
        block = get(out + 8 * place)
        put(get(ctx + REFS) + 8 * block, 0)
        put(ctx + HELD, get(ctx + HELD) - 1)
        if place >= from_local or not park(ctx, block):
            set_free(ctx, block)
            set_free_bits(ctx, block >> 6, 1 << (block & 63))


@inner
def _take_evicted(ctx: int, table: int, out: int, wanted: int, now: int) -> int:
    """Evicts up to `wanted` blocks into the list at `out`; how many."""
    taken = 0
    recounted = False
    while taken < wanted:
        block = evict_one(ctx, True, now)
        if block == NOT_FOUND:
            if recounted:
                break
            recounted = True
            recount_children(ctx)  # a death left a parent with too many children, so that it is no leaf
            continue
        hand_over(ctx, block, table)
        put(out + 8 * taken, block)
        taken += 1
    return taken


@inner
def take(ctx: int, table: int, out: int, wanted: int, now: int) -> bool:
    """Takes `wanted` blocks, MUTABLE and held by the request of `table`, into the list at `out`; or none, and False."""
    if not may_take(ctx, wanted, now):
        count(ctx, FAILURES_OWED, 1)
        return False
    from_local = take_local(ctx, table, out, wanted)
    from_free = take_free(ctx, table, out + 8 * from_local, wanted - from_local)
    taken = from_local + from_free
    evicted = 0
    if taken < wanted:
        idle = count_idle(ctx)
        if idle < wanted - taken:  # blocks whose free bits were lost may make up for it
            from_free += take_unlisted(ctx, table, out + 8 * taken, wanted - taken)
            taken = from_local + from_free
        if idle >= wanted - taken:
            evicted = _take_evicted(ctx, table, out + 8 * taken, wanted - taken, now)
    if taken + evicted < wanted:
        _undo(ctx, out, from_local, taken + evicted)
        note_held(ctx)
        count(ctx, FAILURES_FULL, 1)
        return False
    pause(ctx, HANDED_OVER)
    note_held(ctx)
    held = get(ctx + HELD)
    count(ctx, ALLOCATED_LOCAL, from_local)
    count(ctx, ALLOCATED_FREE, from_free)
    count(ctx, ALLOCATED_EVICT, evicted)
    count(ctx, ALLOCATIONS, 1)
    count(ctx, REQUESTED, wanted)
    count(ctx, USED_SUM, held)
    count_peak(ctx, PEAK_REQUESTED, wanted)
    count_peak(ctx, PEAK_USED, held)
    return True


@inner
def allocate(ctx: int, table: int, wanted: int, now: int) -> int:
    """Appends `wanted` blocks to `table`, which has room for them, and returns 1; or changes nothing and returns 0."""
    held = get(table + TABLE_COUNT)
    if not take(ctx, table, table + TABLE_BLOCKS + 8 * held, wanted, now):
        return 0
    put(table + TABLE_COUNT, held + wanted)
    return 1
