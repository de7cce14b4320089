from __future__ import annotations

from collections import Counter

import numpy as np

from router.view import View
from tests.router.views import route, view


def test_affinity_ignores_load_except_among_equals() -> None:
    assert route(view(cached_tokens=[16, 0], queued_tokens=[10**6, 0]), "affinity").replica_id == "r0"
    assert route(view(cached_tokens=[16, 16], queued_tokens=[9, 8]), "affinity").replica_id == "r1"


def test_least_load_ignores_the_cache() -> None:
    assert route(view(cached_tokens=[1000, 0], queued_tokens=[1, 0]), "least_load").replica_id == "r1"
    assert route(view(running=[1, 0]), "least_load").replica_id == "r1"


def test_round_robin_takes_turns_whatever_the_order_of_candidates() -> None:
    turns = [route(view(3), "round_robin", turn=turn).replica_id for turn in range(6)]
    assert turns == ["r0", "r1", "r2"] * 2
    shuffled = View(["r2", "r0", "r1"], *(np.zeros(3, np.int64),) * 4, np.ones(3))
    assert [route(shuffled, "round_robin", turn=turn).replica_id for turn in range(3)] == ["r0", "r1", "r2"]


def test_power_of_two_takes_the_less_loaded_of_two_and_never_the_worst_of_three() -> None:
    loaded = view(3, queued_tokens=[100, 200, 300])
    counts = Counter(route(loaded, "power_of_two", seed=seed).replica_id for seed in range(300))
    assert set(counts) == {"r0", "r1"}
    assert counts["r0"] > counts["r1"]


def test_power_of_two_of_one() -> None:
    assert route(view(1), "power_of_two").replica_id == "r0"


def test_power_of_two_goes_on_by_load() -> None:
    loaded = view(5, queued_tokens=[1, 2, 3, 4, 5])
    for seed in range(20):
        rest = route(loaded, "power_of_two", seed=seed).order[2:]
        assert list(rest) == sorted(rest)
