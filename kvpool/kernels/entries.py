"""What Python calls: one call a request step, not one a block.

`ctx` is the address of a `Context`, `table` that of a table's record, `keys` and `tokens` those of packed keys (16 bytes
each) and packed token ids (u32), `out` that of an int64 list with room; `now` is monotonic nanoseconds, or `clock.READ_IT`. Each
returns an int64. See the functions behind them for what they do.
"""

from __future__ import annotations

from kvpool.compiled import entry
from kvpool.kernels import allocation, claims, clock, eviction, reclaim, repair, sealing
from kvpool.kernels import census as counting_blocks
from kvpool.kernels import free_blocks as free_list
from kvpool.kernels.atomics import get, load, put
from kvpool.kernels.context import (
    BLOCK_TOKENS,
    CAPACITY,
    CLOSED,
    PARENT,
    SHUT,
    STATE,
    TABLE_BLOCKS,
    TABLE_COUNT,
    TABLE_ROOM,
    TABLE_SEALED,
    TABLE_UNINDEXED,
)
from kvpool.kernels.counting import COW_COPIES, FAILURES_FULL, PEAK_HOLDERS, count, count_peak
from kvpool.kernels.holding import BLOCK_MASK, GAP_BIT, count_gaps, hold_verified, is_indexed, let_go, let_go_all
from kvpool.kernels.index import NOT_FOUND, find
from kvpool.words import PARENT_MASK

NO_ROOM = -1
BAD_COUNT = -2
SHUT_DOWN = -3


@entry
def allocate(ctx: int, table: int, wanted: int, now: int) -> int:
    """See `allocation.allocate`. Or, with nothing done: SHUT_DOWN; BAD_COUNT; NO_ROOM, when the table's record is too short."""
    if get(ctx + SHUT) != 0:
        return SHUT_DOWN
    if wanted <= 0:
        return BAD_COUNT
    if wanted > get(ctx + CAPACITY):
        count(ctx, FAILURES_FULL, 1)
        return 0
    if get(table + TABLE_COUNT) + wanted > get(table + TABLE_ROOM):
        return NO_ROOM
    done = allocation.allocate(ctx, table, wanted, clock.told(ctx, now))
    if done != 0:
        count_peak(ctx, PEAK_HOLDERS, 1)
    return done


@entry
def release(ctx: int, table: int, now: int) -> int:
    """Lets go of all blocks of `table`, the last one first, and empties it; how many. Or SHUT_DOWN."""
    if get(ctx + SHUT) == CLOSED:
        return SHUT_DOWN
    held = get(table + TABLE_COUNT)
    let_go_all(ctx, table + TABLE_BLOCKS, held, clock.told(ctx, now))
    put(table + TABLE_COUNT, 0)
    put(table + TABLE_SEALED, 0)
    put(table + TABLE_UNINDEXED, 0)
    claims.note_held(ctx)
    return held


@entry
def drop(ctx: int, block: int, now: int) -> int:
    """Lets go of one block, once."""
    let_go(ctx, block, clock.told(ctx, now))
    claims.note_held(ctx)
    return 0


@entry
def match(ctx: int, table: int, keys: int, number: int, tokens: int, now: int) -> int:
    """Holds the longest indexed chain of `number` keys for the empty `table`, which has room; its length. `tokens` of all of
    them are compared unless 0.
    """
    now = clock.told(ctx, now)
    step = 4 * get(ctx + BLOCK_TOKENS) if tokens != 0 else 0
    previous = NOT_FOUND
    length = 0
    gap, times = 0, 0  # a chain's blocks were mostly used together, so their gaps are counted in runs
    while length < number:
        key = keys + 16 * length
        held = hold_verified(ctx, get(key), get(key + 8), previous, tokens + step * length, now)
        if held < 0:
            break
        if held >> GAP_BIT != gap:
            count_gaps(ctx, gap, times)
            gap, times = held >> GAP_BIT, 0
        times += 1
        previous = held & BLOCK_MASK
        put(table + TABLE_BLOCKS + 8 * length, previous)
        length += 1
    count_gaps(ctx, gap, times)
    put(table + TABLE_COUNT, length)
    put(table + TABLE_SEALED, length)
    if length > 0:
        count_peak(ctx, PEAK_HOLDERS, 1)
        claims.note_held(ctx)
    return length


@entry
def peek(ctx: int, keys: int, number: int) -> int:
    """The length of the longest indexed chain of `number` keys. Holds nothing."""
    previous = NOT_FOUND
    for length in range(number):
        key = keys + 16 * length
        block = find(ctx, get(key), get(key + 8))
        if block == NOT_FOUND or not is_indexed(load(get(ctx + STATE) + 8 * block)):
            return length
        if (get(get(ctx + PARENT) + 8 * block) & PARENT_MASK) - 1 != previous:
            return length
        previous = block
    return number


@entry
def seal(ctx: int, table: int, position: int, key: int, tokens: int, now: int) -> int:
    """See `sealing.seal`."""
    now = clock.told(ctx, now)
    if get(table + TABLE_UNINDEXED) != 0:
        sealing.index_late(ctx, table, now, True)
    return sealing.seal(ctx, table, position, get(key), get(key + 8), tokens, now)


@entry
def index_late(ctx: int, table: int, now: int) -> int:
    """See `sealing.index_late`; never moves a request over to other blocks."""
    return sealing.index_late(ctx, table, clock.told(ctx, now), False)


@entry
def copy_on_write(ctx: int, table: int, position: int, now: int) -> int:
    """Puts a new block of ours at `position` of `table`, whose sealed blocks end there; the block that stood there, still
    held; itself if it is ours to write; or NOT_FOUND when no block can be had.
    """
    place = table + TABLE_BLOCKS + 8 * position
    source = get(place)
    if sealing.is_own(ctx, source):
        return source
    if not allocation.take(ctx, table, place, 1, clock.told(ctx, now)):
        put(place, source)
        return NOT_FOUND
    put(table + TABLE_SEALED, min(position, get(table + TABLE_SEALED)))
    count(ctx, COW_COPIES, 1)
    return source


@entry
def evict(ctx: int, number: int, now: int) -> int:
    """Frees up to `number` idle leaves, oldest first; how many."""
    done = 0
    now = clock.told(ctx, now)
    while done < number and eviction.evict_one(ctx, False, now) != NOT_FOUND:
        done += 1
    return done


@entry
def yield_local(ctx: int) -> int:
    """Empties the local cache if another process waits for blocks; how many they were."""
    return free_list.flush_local(ctx) if free_list.others_wait(ctx) else 0


@entry
def flush_local(ctx: int) -> int:
    """See `free_blocks.flush_local`."""
    return free_list.flush_local(ctx)


@entry
def is_own(ctx: int, block: int) -> int:
    """See `sealing.is_own`."""
    return 1 if sealing.is_own(ctx, block) else 0


@entry
def census(ctx: int, out: int) -> int:
    """See `census.census`."""
    return counting_blocks.census(ctx, out)


@entry
def demanded(ctx: int, now: int) -> int:
    """See `claims.demanded`."""
    return claims.demanded(ctx, clock.told(ctx, now))


@entry
def announce(ctx: int) -> int:
    """See `claims.announce`."""
    return claims.announce(ctx)


@entry
def withdraw(ctx: int, slot: int) -> int:
    """See `claims.withdraw`."""
    return claims.withdraw(ctx, slot)


@entry
def wait_in_line(ctx: int, wanted: int, now: int) -> int:
    """See `claims.wait_in_line`."""
    return claims.wait_in_line(ctx, wanted, clock.told(ctx, now))


@entry
def leave_line(ctx: int) -> int:
    """See `claims.leave_line`."""
    return claims.leave_line(ctx)


@entry
def reclaim_slot(ctx: int, dead: int) -> int:
    """See `reclaim.reclaim`."""
    return reclaim.reclaim(ctx, dead)


@entry
def restore_free_bits(ctx: int) -> int:
    """See `repair.restore_free_bits`."""
    return repair.restore_free_bits(ctx)


@entry
def recount_children(ctx: int) -> int:
    """See `repair.recount_children`."""
    return repair.recount_children(ctx)
