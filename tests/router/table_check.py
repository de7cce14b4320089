"""Reads a key table word by word and says whether it is what its description promises."""

from __future__ import annotations

import numpy as np

from router.kernels.context import (
    BITSET,
    CAPACITY,
    COUNT,
    COUNT_MASK,
    FEW,
    HELD,
    INLINE,
    ROW_BYTES,
    ROWS,
    SET_WORDS,
    SETS_FREE,
    SETS_MADE,
    SETS_USED,
    USED,
)
from router.kernels.rows import unscrambled
from router.key_table import KeyTable


def holders_of(table: KeyTable) -> dict[bytes, set[int]]:
    """Returns the slots of each key, hidden ones included. Fails when the table breaks one of its rules."""
    words = table._context.words
    rows = table._rows.words.reshape(-1, ROW_BYTES // 8)
    assert len(rows) == words[ROWS >> 3]
    shorts = rows.view(np.uint16)
    sets = table._sets.words.view(np.uint64).reshape(-1, int(words[SET_WORDS >> 3]))
    found: dict[bytes, set[int]] = {}
    numbers = []
    before, was_empty = -1, True
    for number in range(len(rows)):
        count = int(shorts[number, COUNT // 2])
        if count == 0:
            was_empty = True
            continue
        word, second = int(rows[number, 0]), int(rows[number, 1])
        place = word >> 32 & 0xFFFFFFFF
        home = place * int(words[CAPACITY >> 3]) >> 32
        assert home <= number
        assert place >= before, "the rows are in the order of places"
        assert home == number or not was_empty, "there is no empty row between home and row"
        before, was_empty = place, False
        if count & BITSET:
            numbers.append(int(rows[number, 3]))
            bits = {
                64 * index + bit
                for index, one in enumerate(sets[numbers[-1]].tolist())
                for bit in range(64)
                if one >> bit & 1
            }
            assert len(bits) == count & COUNT_MASK > FEW
        else:
            held = shorts[number, COUNT // 2 + 1 : COUNT // 2 + 1 + count].tolist()
            bits = set(held)
            assert len(bits) == len(held) <= INLINE
        first = unscrambled.py_func(word, second)  # type: ignore[attr-defined]
        key = b"".join((part & (1 << 64) - 1).to_bytes(8, "little") for part in (first, second))
        assert key not in found
        found[key] = {bit + 1 for bit in bits}
    assert was_empty, "the last row is empty"
    assert len(found) == words[USED >> 3]
    _check_sets(table, numbers)
    for slot in range(1, table.slots + 1):
        assert (
            table.held(slot) == sum(slot in slots for slots in found.values()) or slot in table._dead + table._cleaning
        )
    assert words[HELD >> 3] == table._held.address
    return found


def _check_sets(table: KeyTable, used: list[int]) -> None:
    """Every set is either one row's or in the list of free ones."""
    words = table._context.words
    sets = table._sets.words.reshape(-1, int(words[SET_WORDS >> 3]))
    free = []
    number = int(words[SETS_FREE >> 3])
    while number >= 0:
        free.append(number)
        number = int(sets[number, 0])
    assert len(used) == words[SETS_USED >> 3]
    assert sorted(used + free) == list(range(int(words[SETS_MADE >> 3])))
