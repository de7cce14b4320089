"""Going through all rows in the order of their places, some thousands at a time; rows may move between two calls.

A call begins where the one before said, and sees every row from that place on that is there now: a key that stays in the table
all the time is seen exactly once.
"""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, put
from router.kernels import holders
from router.kernels.context import BITSET, CAPACITY, COUNT, DEAD, END, HOLDERS, ROW_BYTES, ROWS, TABLE
from router.kernels.rows import erase, home_of, is_empty, place_of, unscrambled
from router.kernels.words import get_short


@inner
def _place_at(ctx: int, row: int) -> int:
    """The first place whose home is at or after this row, which is empty."""
    number = (row - get(ctx + TABLE)) // ROW_BYTES
    capacity = get(ctx + CAPACITY)
    return min(END, ((number << 32) + capacity - 1) // capacity)


@inner
def clean(ctx: int, place: int, number: int) -> int:
    """Takes the slots in DEAD out of about `number` rows from `place` on; the place to go on from, or END."""
    row = home_of(ctx, place)
    last = get(ctx + TABLE) + (get(ctx + ROWS) - 1) * ROW_BYTES
    dead = get(ctx + DEAD)
    while row < last:
        if is_empty(row):
            if number <= 0:
                return _place_at(ctx, row)
            row += ROW_BYTES
            number -= 1
            continue
        here = place_of(get(row))
        if number <= 0 and here > place:
            return here
        number -= 1
        place = here
        holders.remove_all(ctx, row, dead)
        if is_empty(row):
            erase(ctx, row)  # and look at the row that has moved here
        else:
            row += ROW_BYTES
    return END


@inner
def _holds(ctx: int, row: int, bit: int) -> bool:
    count = get_short(row + COUNT)
    if count & BITSET != 0:
        return holders.has_bit(holders.set_of(ctx, row), bit)
    found = False
    for at in range(row + HOLDERS, row + HOLDERS + 2 * count, 2):
        found = found | (get_short(at) == bit)
    return found


@inner
def keys_of(ctx: int, bit: int, place: int, number: int, out: int, room: int) -> int:
    """Writes the keys that a slot holds, of about `number` rows from `place` on, to `out`; the place to go on from, or END.

    Two words precede the keys; the first says how many. There is room for `room` keys, more than `number`: rows that share their
    place are in one call. A crowd of them beyond the room is left out.
    """
    row = home_of(ctx, place)
    last = get(ctx + TABLE) + (get(ctx + ROWS) - 1) * ROW_BYTES
    found = 0
    begin, before = place, place
    while row < last:
        if is_empty(row):
            if number <= 0:
                put(out, found)
                return _place_at(ctx, row)
        else:
            here = place_of(get(row))
            if number <= 0 and here > before:
                put(out, found)
                return here
            before = max(here, before)
            if here >= begin and found < room and _holds(ctx, row, bit):
                second = get(row + 8)
                put(out + 16 * found + 16, unscrambled(get(row), second))
                put(out + 16 * found + 24, second)
                found += 1
        row += ROW_BYTES
        number -= 1
    put(out, found)
    return END
