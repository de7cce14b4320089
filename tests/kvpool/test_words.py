from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import words
from kvpool.words import EVICTING, FREE, FREEING, INDEXED, LOCAL, MUTABLE, NO_SLOT, SEALED


@given(st.sampled_from(list(words.STATE_NAMES)), st.integers(NO_SLOT, 63), st.integers(0, words.GENERATION_MASK))
def test_pack_and_unpack(state: int, slot: int, generation: int) -> None:
    word = words.pack(state, slot, generation)
    assert 0 <= word < 2**63
    assert (words.state_of(word), words.owner_of(word), words.generation_of(word)) == (state, slot, generation)


def test_zeroed_memory_is_no_state() -> None:
    assert words.state_of(0) not in words.STATE_NAMES
    assert words.describe(0) == "state 0?, generation 0"


def test_the_legal_steps_are_these() -> None:
    steps = {(before, after) for before, allowed in words.LEGAL.items() for after in allowed}
    assert steps == {
        (FREE, LOCAL),
        (FREE, MUTABLE),
        (LOCAL, MUTABLE),
        (LOCAL, FREE),
        (MUTABLE, SEALED),
        (MUTABLE, LOCAL),
        (MUTABLE, FREE),
        (SEALED, INDEXED),
        (SEALED, LOCAL),
        (SEALED, FREE),
        (INDEXED, EVICTING),
        (EVICTING, INDEXED),
        (EVICTING, FREEING),
        (FREEING, FREE),
        (FREEING, MUTABLE),
    }


@pytest.mark.parametrize(("before", "after"), list(itertools.product(words.STATE_NAMES, repeat=2)))
def test_moved(before: int, after: int) -> None:
    word = words.pack(before, 3, 41)
    if after not in words.LEGAL[before]:
        with pytest.raises(AssertionError, match="illegal step of a block"):
            words.moved(word, after, 5)
        return
    new = words.moved(word, after, 5)
    assert (words.state_of(new), words.owner_of(new)) == (after, 5)
    given_up = after in (FREE, LOCAL, MUTABLE) and before != FREE and (before, after) != (LOCAL, MUTABLE)
    assert words.generation_of(new) == 41 + given_up


def test_generation_wraps_without_touching_the_sign() -> None:
    word = words.pack(FREEING, 1, words.GENERATION_MASK)
    assert words.moved(word, FREE, NO_SLOT) == words.pack(FREE, NO_SLOT, 0)


def test_describe() -> None:
    assert words.describe(words.pack(MUTABLE, 7, 2)) == "MUTABLE, generation 2, owner slot 7"
    assert words.describe(words.pack(FREE, NO_SLOT, 9)) == "FREE, generation 9"
