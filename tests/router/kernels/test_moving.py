from __future__ import annotations

import random

import numpy as np
import pytest

from kvpool.directory.digest import digest_of
from router.kernels import key_entries as entries
from router.kernels.context import ROW_BYTES
from router.key_table import KeyTable
from tests.router.table_check import holders_of


def filled(rng: random.Random, keys: int, pools: int) -> KeyTable:
    table = KeyTable(lambda: None)
    packed = rng.randbytes(16 * keys)
    for number in range(pools):
        part = packed[: 16 * (keys * (number + 1) // pools)]
        assert table.change(table.take(), b"", part, 0) == (digest_of(part), True)
    return table


@pytest.mark.parametrize("capacity", [1500, 2000, 5000, 100_000])
def test_rows_are_the_same_in_a_table_of_any_size(capacity: int) -> None:
    table = filled(random.Random(1), 1300, 20)
    before = holders_of(table)
    table._use_rows(capacity)
    assert holders_of(table) == before
    assert len(before) == 1300


def test_what_does_not_fit_is_left_where_it_is() -> None:
    table = filled(random.Random(2), 5000, 1)
    before = holders_of(table)
    room = np.empty(600 * ROW_BYTES // 8, np.int64)
    assert entries.move_rows(table._ctx, room.ctypes.data, 500, 600) == 0
    table._use_rows(100)
    assert holders_of(table) == before


@pytest.mark.parametrize("words", [1, 2, 7])
def test_sets_may_become_wider(words: int) -> None:
    table = filled(random.Random(3), 500, 60)
    before = holders_of(table)
    table._use_sets(2000, words)
    assert holders_of(table) == before
    assert table.slots == 64 * words
    assert max(map(len, before.values())) > 7
