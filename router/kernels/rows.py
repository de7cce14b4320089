"""Rows in the order of their keys: open addressing by a number that the key itself gives.

The first word of a row is the key's first word, scrambled together with its second: two multiplications, which can be
undone (`unscrambled`), so the row needs no room for it. The upper half of that word is the key's place, from 0 to
2^32; its home is the row at that fraction of the table, so any capacity will do.

A key stands at its home or after it, and all rows from one empty row to the next are in the order of their places. So
a look-up ends at the first row with a later place, not only at an empty one; taking a row out moves those after it
up, and leaves no trace; and whoever goes through the table in the order of places (`walking.py`, `moving.py`) may
stop and go on after rows have moved.

Limits: keys are hashes. Keys of one's own making that share the upper half of the scrambled word would make one long
row of rows.
"""

from __future__ import annotations

from typing import Final

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, put
from router.kernels.context import CAPACITY, COUNT, ROW_BYTES, ROWS, TABLE, USED
from router.kernels.words import get_short, prefetch


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_TURN: Final = 0x9E3779B97F4A7C15
_SPREAD: Final = 0xD6E8FEB86659FD93
_SIGNED_TURN: Final = _signed(_TURN)
_SIGNED_SPREAD: Final = _signed(_SPREAD)
_SIGNED_BACK: Final = _signed(pow(_SPREAD, -1, 1 << 64))
_LOW: Final = 0xFFFFFFFF


@inner
def scrambled(first: int, second: int) -> int:
    """What stands for the first word of the key (first, second)."""
    return (first ^ second * _SIGNED_TURN) * _SIGNED_SPREAD


@inner
def unscrambled(word: int, second: int) -> int:
    """The first word of the key whose row has (word, second)."""
    return word * _SIGNED_BACK ^ second * _SIGNED_TURN


@inner
def place_of(word: int) -> int:
    """The place of a key, 0 to 2^32 - 1, by its scrambled word."""
    return word >> 32 & _LOW


@inner
def home_of(ctx: int, place: int) -> int:
    """The address of the row where a key with this place would like to be."""
    return get(ctx + TABLE) + (place * get(ctx + CAPACITY) >> 32) * ROW_BYTES


@inner
def is_empty(row: int) -> bool:
    """Whether the row at this address has no key."""
    return get_short(row + COUNT) == 0


@inner
def ask_for(home: int) -> None:
    """Begins to fetch the three cache lines in which a key with this home is nearly always found."""
    prefetch(home)
    prefetch(home + 2 * ROW_BYTES)
    prefetch(home + 4 * ROW_BYTES)


@inner
def find(row: int, word: int, second: int) -> int:
    """The row of a key, looked for from its home on, or 0."""
    place = place_of(word)
    while not is_empty(row):
        here = get(row)
        if here == word and get(row + 8) == second:
            return row
        if place_of(here) > place:
            return 0
        row += ROW_BYTES
    return 0


@inner
def insert(ctx: int, row: int, word: int, second: int) -> int:
    """Makes a row for a key that has none, looked for from its home on; the row, still without a holder. 0: no room.

    The caller gives it a holder at once: a row without one is an empty row.
    """
    place = place_of(word)
    while not is_empty(row) and place_of(get(row)) <= place:
        row += ROW_BYTES
    free = row
    while not is_empty(free):
        free += ROW_BYTES
    if free >= get(ctx + TABLE) + (get(ctx + ROWS) - 1) * ROW_BYTES:
        return 0
    for at in range(free - 8, row - 8, -8):
        put(at + ROW_BYTES, get(at))
    put(row, word)
    put(row + 8, second)
    put(row + COUNT, 0)
    put(row + COUNT + 8, 0)
    put(ctx + USED, get(ctx + USED) + 1)
    return row


@inner
def erase(ctx: int, row: int) -> None:
    """Takes a row out; those after it that are not at home move up by one."""
    after = row + ROW_BYTES
    while not is_empty(after) and home_of(ctx, place_of(get(after))) != after:
        for at in range(after, after + ROW_BYTES, 8):
            put(at - ROW_BYTES, get(at))
        after += ROW_BYTES
    put(after - ROW_BYTES + COUNT, 0)
    put(ctx + USED, get(ctx + USED) - 1)
