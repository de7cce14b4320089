"""Copying rows and sets to where there is more room. The old ones stay as they are, so look-ups go on meanwhile."""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, put
from router.kernels.context import COUNT, ROW_BYTES, ROWS, SET_WORDS, SETS, SETS_MADE, TABLE
from router.kernels.rows import is_empty, place_of


@inner
def move_rows(ctx: int, table: int, capacity: int, rows: int) -> int:
    """Writes all of the `rows` rows at `table`, which have `capacity` homes; 1, or 0 when they do not fit."""
    old = get(ctx + TABLE)
    free = table
    last = table + (rows - 1) * ROW_BYTES
    for row in range(old, old + get(ctx + ROWS) * ROW_BYTES, ROW_BYTES):
        if is_empty(row):
            continue
        home = table + (place_of(get(row)) * capacity >> 32) * ROW_BYTES
        while free < home:
            put(free + COUNT, 0)
            free += ROW_BYTES
        if free >= last:
            return 0
        for offset in range(0, ROW_BYTES, 8):
            put(free + offset, get(row + offset))
        free += ROW_BYTES
    while free <= last:
        put(free + COUNT, 0)
        free += ROW_BYTES
    return 1


@inner
def move_sets(ctx: int, sets: int, words: int) -> int:
    """Writes all sets that were ever used at `sets`, `words` words each."""
    old, size = get(ctx + SETS), get(ctx + SET_WORDS)
    for number in range(get(ctx + SETS_MADE)):
        for index in range(words):
            put(sets + 8 * (number * words + index), get(old + 8 * (number * size + index)) if index < size else 0)
    return 0
