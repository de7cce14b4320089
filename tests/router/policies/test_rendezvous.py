from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.policies.rendezvous import hash_of, mixed, preferred, replica_hashes


def test_hashes_are_the_same_in_every_process() -> None:
    assert hash_of(b"kvatlas") == 0x960B66212F56747E
    assert mixed(np.array([0, 1], np.uint64)).tolist() == [0, 0x5692161D100B05E5]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, unique=True))
def test_mixing_is_one_to_one(words: list[int]) -> None:
    assert len(set(mixed(np.array(words, np.uint64)).tolist())) == len(words)


@given(st.text(), st.lists(st.booleans(), min_size=1, max_size=8))
def test_it_prefers_one_that_is_marked(name: str, marks: list[bool]) -> None:
    among = np.array(marks)
    if among.any():
        assert among[preferred(name, [f"r{index}" for index in range(len(marks))], among)]


def test_everybody_is_preferred_by_as_many_names() -> None:
    ids, among = [f"replica-{index}" for index in range(16)], np.ones(16, np.bool_)
    chosen = Counter(preferred(f"session-{number}", ids, among) for number in range(3200))
    assert len(chosen) == 16
    assert all(abs(count - 200) < 70 for count in chosen.values())


def test_hashes_cannot_be_changed_by_who_gets_them() -> None:
    assert not replica_hashes(("a", "b")).flags.writeable
