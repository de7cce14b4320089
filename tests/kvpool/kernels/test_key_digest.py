from __future__ import annotations

import random

import pytest

from kvpool.directory.digest import changed, digest_of
from kvpool.kernels.key_digest import sum_of_keys, sum_of_many_keys
from kvpool.packed import address_of

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def by_the_book(packed: bytes) -> int:
    """The rule of `kvpool/directory/digest.py` in integers of any length."""
    total = 0
    for at in range(0, len(packed), 16):
        first, second = (int.from_bytes(packed[at + part : at + part + 8], "little") for part in (0, 8))
        total += mix(mix(first + 0x9E3779B97F4A7C15 & MASK) + second & MASK)
    return total & MASK


@pytest.mark.parametrize("number", [0, 1, 2, 100, 4095, 4096, 5000])
def test_both_entries_follow_the_rule(number: int) -> None:
    packed = random.Random(number).randbytes(16 * number)
    expected = by_the_book(packed)
    assert sum_of_keys(address_of(packed), number) & MASK == expected
    assert sum_of_many_keys(address_of(packed), number) & MASK == expected
    assert digest_of(packed) == expected
    assert changed(digest_of(bytes(16)), bytes(16), packed) == expected


@pytest.mark.parametrize("key", [bytes(16), b"\xff" * 16, bytes(15) + b"\x80", bytes(7) + b"\x80" + bytes(8)])
def test_signs_do_not_matter(key: bytes) -> None:
    assert digest_of(key) == by_the_book(key)
