"""What Python calls. `ctx` is the address of a table's record (`context.py`), `bit` a slot less one, keys are packed,
16 bytes each.

Each returns an int64. See the functions behind them for what they do.
"""

from __future__ import annotations

from kvpool.compiled import entry, long_entry
from kvpool.kernels.atomics import get, put
from router.kernels import changing, holders, moving, walking
from router.kernels import depths as looking
from router.kernels.context import (
    CAPACITY,
    DEAD,
    HELD,
    HIDDEN,
    LIVE,
    ROWS,
    SET_WORDS,
    SETS,
    SETS_ROOM,
    TABLE,
)

TOO_SMALL = -1


@entry
def depths_of_keys(ctx: int, keys: int, number: int, out: int, room: int, scratch: int, scratch_words: int) -> int:
    """See `depths.depths`. `room`: words of 64 slots that `out` has room for. TOO_SMALL, with nothing done: one of both is."""
    words = get(ctx + SET_WORDS)
    if room < words or scratch_words < looking.SCRATCH * number + words + looking.SCRATCH_MORE:
        return TOO_SMALL
    return looking.depths(ctx, keys, number, out, scratch)


@entry
def change_keys(ctx: int, bit: int, removed: int, gone: int, added: int, come: int, digest: int) -> int:
    """See `changing.change`."""
    return changing.change(ctx, bit, removed, gone, added, come, digest)


@entry
def show_slot(ctx: int, bit: int) -> int:
    """Look-ups see a slot that was hidden."""
    holders.flip_bit(get(ctx + LIVE), bit)
    put(ctx + HIDDEN, get(ctx + HIDDEN) - 1)
    return 0


@entry
def hide_slot(ctx: int, bit: int) -> int:
    """Look-ups do not see a slot that they saw."""
    holders.flip_bit(get(ctx + LIVE), bit)
    put(ctx + HIDDEN, get(ctx + HIDDEN) + 1)
    return 0


@entry
def clean_rows(ctx: int, place: int, number: int) -> int:
    """See `walking.clean`."""
    return walking.clean(ctx, place, number)


@entry
def keys_of_slot(ctx: int, bit: int, place: int, number: int, out: int, room: int) -> int:
    """See `walking.keys_of`."""
    return walking.keys_of(ctx, bit, place, number, out, room)


@long_entry
def move_rows(ctx: int, table: int, capacity: int, rows: int) -> int:
    """See `moving.move_rows`."""
    return moving.move_rows(ctx, table, capacity, rows)


@long_entry
def move_sets(ctx: int, sets: int, words: int) -> int:
    """See `moving.move_sets`."""
    return moving.move_sets(ctx, sets, words)


@entry
def use_rows(ctx: int, table: int, capacity: int, rows: int) -> int:
    """From now on the rows are those at `table`."""
    put(ctx + TABLE, table)
    put(ctx + CAPACITY, capacity)
    put(ctx + ROWS, rows)
    return 0


@entry
def use_sets(ctx: int, sets: int, room: int, words: int, live: int, dead: int, held: int) -> int:
    """From now on the sets are those at `sets`, with all that is as wide as they are."""
    put(ctx + SETS, sets)
    put(ctx + SETS_ROOM, room)
    put(ctx + SET_WORDS, words)
    put(ctx + LIVE, live)
    put(ctx + DEAD, dead)
    put(ctx + HELD, held)
    return 0
