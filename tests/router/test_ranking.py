"""Ranks follow scores, and chance decides among equals, each order as likely as another."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.ranking import ranked


def test_all_orders_of_equals_are_equally_likely() -> None:
    rng = random.Random(5)
    seen = Counter(tuple(ranked(np.array([1.0, 0.5, 0.5, 0.5]), 0.0, -1, rng)) for _ in range(1200))
    assert set(seen) == {(*first, 0) for first in permutations((1, 2, 3))}
    assert all(abs(count - 200) < 65 for count in seen.values())


def test_within_a_tie_one_may_come_first() -> None:
    score = np.array([1.0, 1.4, 1.6, 9.0])
    assert {tuple(ranked(score, 0.5, 1, random.Random(seed))) for seed in range(20)} == {(1, 0, 2, 3)}
    by_chance = {tuple(ranked(score, 0.5, -1, random.Random(seed))) for seed in range(40)}
    assert by_chance == {(0, 1, 2, 3), (1, 0, 2, 3)}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.integers(0, 2**32))
def test_everybody_is_ranked_once_and_by_score(scores: list[int], seed: int) -> None:
    order = ranked(np.array(scores, np.float64), 0.0, -1, random.Random(seed))
    assert sorted(order) == list(range(len(scores)))
    assert [scores[place] for place in order] == sorted(scores)
