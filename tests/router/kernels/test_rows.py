from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.kernels.rows import place_of, scrambled, unscrambled

words = st.integers(-(1 << 63), (1 << 63) - 1)


def signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


@given(words, words)
def test_a_key_can_be_had_back_from_its_row(first: int, second: int) -> None:
    assert unscrambled(scrambled(first, second), second) == first


@given(words, words)
def test_the_place_is_the_upper_half(first: int, second: int) -> None:
    word = scrambled(first, second)
    assert word == signed(scrambled.py_func(first, second))  # type: ignore[attr-defined]
    assert place_of(word) == (word & (1 << 64) - 1) >> 32


def test_numbers_are_spread_over_all_places() -> None:
    for keys in (
        [(number, 0) for number in range(4096)],
        [(0, number) for number in range(4096)],
        [(0, signed(int.from_bytes(number.to_bytes(8, "big"), "little"))) for number in range(4096)],
    ):
        parts = [0] * 64
        for first, second in keys:
            parts[place_of(scrambled(first, second)) >> 26] += 1
        assert max(parts) < 2 * 64
