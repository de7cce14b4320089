"""Declaring a block complete, and adding it to the index.

The block's owner writes key, tokens and parent, then makes it SEALED. It becomes INDEXED in steps, each of which a death may
be the last: the parent counts the child; the index gets the entry; our holder bit is set; the state goes to INDEXED; the dirty
bit is set. All this while we hold the parent, which is INDEXED, so the index is prefix-closed, and whoever holds a
block holds all blocks before it.

A key that is indexed already is not indexed again: the request moves over to the block that has it and gives its own
back. If that block has other tokens or another parent, ours is a collision and stays private for good. If the index is
contended, ours stays SEALED and is tried again later (`index_late`).
"""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import fetch_add, fetch_or, get, get_half, load, put, put_half, store
from kvpool.kernels.context import (
    BIT,
    BLOCK_TOKENS,
    BORN,
    CHILDREN,
    DIRTY_BITS,
    FILLED,
    HOLDERS,
    KEY,
    LAST_USE,
    MINE,
    PARENT,
    REFS,
    STATE,
    TABLE_BLOCKS,
    TABLE_SEALED,
    TABLE_UNINDEXED,
    TOKENS,
)
from kvpool.kernels.counting import (
    DEDUPS,
    LATE_INDEXED,
    UNINDEXED_CONTENDED,
    UNINDEXED_FULL,
    count,
)
from kvpool.kernels.eviction import CHILD_COUNT, ONE_CHILD
from kvpool.kernels.free_blocks import same_life
from kvpool.kernels.holding import COLLIDES, MOVING, block_of, hold_verified, is_indexed, is_ours, let_go
from kvpool.kernels.index import ADDED, FULL, NOT_FOUND, add
from kvpool.kernels.pause import COUNTED, ENTERED, HELD, IN_INDEX, SEALED_ONLY, pause
from kvpool.words import DEPTH_SHIFT, INDEXED, MUTABLE, SEALED, STATE_MASK

NOT_OURS = -2
PRIVATE = 1 << 62
"""Parent word of a block that stays out of the index for good: depth and parent of nothing."""
_LESS_ONE_CHILD = (1 << 32) - 1


@inner
def is_own(ctx: int, block: int) -> bool:
    """Whether `block` is MUTABLE, ours, and held by exactly one request."""
    word = load(get(ctx + STATE) + 8 * block)
    return word & STATE_MASK == MUTABLE and is_ours(ctx, word) and get(get(ctx + REFS) + 8 * block) == 1


@inner
def _link(ctx: int, parent: int) -> int:
    """The parent word of a block that follows `parent`."""
    if parent == NOT_FOUND:
        return 0
    return (get(get(ctx + PARENT) + 8 * parent) >> DEPTH_SHIFT) + 1 << DEPTH_SHIFT | parent + 1


@inner
def _move_over(ctx: int, place: int, other: int, now: int) -> None:
    """The request that has its own block at `place` goes on with `other`, which is held for it, and gives its own back."""
    own = get(place)
    put(place, other)
    count(ctx, DEDUPS, 1)
    let_go(ctx, own, now)


@inner
def _publish(ctx: int, block: int, parent: int) -> bool:
    """SEALED -> INDEXED; False when it has to stay SEALED for now."""
    if parent != NOT_FOUND:
        fetch_add(get(ctx + CHILDREN) + 8 * parent, ONE_CHILD)
    pause(ctx, COUNTED)
    outcome = add(ctx, block)
    if outcome != ADDED:
        if parent != NOT_FOUND:
            fetch_add(get(ctx + CHILDREN) + 8 * parent, _LESS_ONE_CHILD)
        count(ctx, UNINDEXED_FULL if outcome == FULL else UNINDEXED_CONTENDED, 1)
        return False
    pause(ctx, ENTERED)
    fetch_or(get(ctx + HOLDERS) + 8 * block, get(ctx + BIT))
    pause(ctx, HELD)
    address = get(ctx + STATE) + 8 * block
    store(address, same_life(load(address)) | INDEXED)
    pause(ctx, IN_INDEX)
    fetch_or(get(ctx + DIRTY_BITS) + 8 * (block >> 6), 1 << (block & 63))
    return True


@inner
def _write(ctx: int, block: int, first: int, second: int, tokens: int, now: int) -> None:
    """Writes what is known of a block of ours that is complete."""
    size = get(ctx + BLOCK_TOKENS)
    stored = get(ctx + TOKENS) + 4 * size * block
    for place in range(size):
        put_half(stored + 4 * place, get_half(tokens + 4 * place))
    key = get(ctx + KEY) + 16 * block
    put(key, first)
    put(key + 8, second)
    children = get(ctx + CHILDREN) + 8 * block
    put(children, (get(children) | CHILD_COUNT) + 1)  # none, and a new version
    put(get(ctx + BORN) + 8 * block, now)
    put(get(ctx + LAST_USE) + 8 * block, now)
    put(get(ctx + FILLED) + 8 * block, size)


@inner
def seal(ctx: int, table: int, position: int, first: int, second: int, tokens: int, now: int) -> int:
    """Seals the block at `position`, the first unsealed one of `table`, with the key (first, second) and the ids at
    `tokens`; the block that stands there now, or NOT_OURS.
    """
    blocks = table + TABLE_BLOCKS
    own = get(blocks + 8 * position)
    if not is_own(ctx, own):
        return NOT_OURS
    parent = get(blocks + 8 * (position - 1)) if position > 0 else NOT_FOUND
    linked = parent == NOT_FOUND or is_indexed(load(get(ctx + STATE) + 8 * parent))
    other = hold_verified(ctx, first, second, parent, tokens, now) if linked else NOT_FOUND
    put(table + TABLE_SEALED, position + 1)
    if other >= 0:
        other = block_of(ctx, other)
        _move_over(ctx, blocks + 8 * position, other, now)
        return other
    _write(ctx, own, first, second, tokens, now)
    free_to_link = linked and other == NOT_FOUND
    put(get(ctx + PARENT) + 8 * own, PRIVATE if other == COLLIDES else _link(ctx, parent) if free_to_link else 0)
    address = get(ctx + STATE) + 8 * own
    store(address, same_life(load(address)) | get(ctx + MINE) | SEALED)
    pause(ctx, SEALED_ONLY)
    if not (free_to_link and _publish(ctx, own, parent)):
        put(table + TABLE_UNINDEXED, 1)
    return own


@inner
def index_late(ctx: int, table: int, now: int, may_move: bool) -> int:
    """Tries again to index the sealed blocks of `table` that are not; how many it could.

    With `may_move` the request also moves over to blocks that others have indexed under its keys. Only the thread that
    computes may do that: a step in progress reads the blocks that the table had when it began.
    """
    blocks = table + TABLE_BLOCKS
    parent = NOT_FOUND
    done = 0
    for position in range(get(table + TABLE_SEALED)):
        block = get(blocks + 8 * position)
        if not is_indexed(load(get(ctx + STATE) + 8 * block)):
            word = get(ctx + PARENT) + 8 * block
            if get(word) == PRIVATE:
                break
            key = get(ctx + KEY) + 16 * block
            tokens = get(ctx + TOKENS) + 4 * get(ctx + BLOCK_TOKENS) * block
            other = hold_verified(ctx, get(key), get(key + 8), parent, tokens, now)
            if other >= 0:
                block = block_of(ctx, other)
                if not may_move:
                    let_go(ctx, block, now)
                    return done
                _move_over(ctx, blocks + 8 * position, block, now)
            elif other == COLLIDES:
                put(word, PRIVATE)
                break
            else:
                put(word, _link(ctx, parent))
                if other == MOVING or not _publish(ctx, block, parent):
                    return done
            count(ctx, LATE_INDEXED, 1)
            done += 1
        parent = block
    put(table + TABLE_UNINDEXED, 0)
    return done
