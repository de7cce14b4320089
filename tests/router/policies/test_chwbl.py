from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.chwbl import LOAD_FACTOR, POINTS, _points
from router.policies.rendezvous import hash_of
from tests.router.views import route, view


def on_the_ring(prefix: bytes, replica_ids: list[str]) -> list[str]:
    """The replicas as one meets them going round a ring of all points, built point by point."""
    points = sorted(
        (point, replica_id)
        for replica_id, row in zip(replica_ids, _points(tuple(replica_ids)).tolist(), strict=True)
        for point in row
    )
    place = hash_of(prefix)
    around = [one for one in points if one[0] >= place] + [one for one in points if one[0] < place]
    return list(dict.fromkeys(replica_id for _, replica_id in around))


@given(st.binary(min_size=1), st.integers(1, 6))
def test_an_idle_ring_is_walked_clockwise(prefix: bytes, n: int) -> None:
    decision = route(view(n), "chwbl", prefix=prefix)
    assert decision.ranking == on_the_ring(prefix, [f"r{index}" for index in range(n)])
    assert decision.reason == "next on the ring"


@given(st.binary(min_size=1), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_the_first_that_is_not_overloaded(prefix: bytes, running: list[int], data: st.DataObject) -> None:
    n = len(running)
    waiting = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    load = [one + other for one, other in zip(running, waiting, strict=True)]
    most = LOAD_FACTOR * (sum(load) + 1) / n
    ring = on_the_ring(prefix, [f"r{index}" for index in range(n)])
    decision = route(view(n, running=running, waiting=waiting), "chwbl", prefix=prefix)
    wanted = next(replica_id for replica_id in ring if load[int(replica_id[1:])] <= most)
    assert decision.replica_id == wanted
    assert (decision.reason == "next on the ring") == (wanted == ring[0])


def test_every_replica_gets_as_many_beginnings_as_its_points_allow() -> None:
    chosen = Counter(route(view(4), "chwbl", prefix=b"%d" % number).replica_id for number in range(2000))
    # The share of one replica varies by 1/sqrt(points).
    assert all(abs(count / 500 - 1) < 4 / POINTS**0.5 for count in chosen.values())
    assert len(chosen) == 4


def test_a_replica_that_goes_takes_only_its_own() -> None:
    for number in range(50):
        with_it, without = (route(view(n), "chwbl", prefix=b"%d" % number).replica_id for n in (5, 4))
        assert with_it in (without, "r4")


def test_equal_beginnings_meet_and_a_prompt_without_one_goes_anywhere() -> None:
    assert len({route(view(5), "chwbl", prefix=b"system", seed=seed).replica_id for seed in range(20)}) == 1
    assert len({route(view(5), "chwbl", seed=seed).replica_id for seed in range(100)}) == 5


@pytest.mark.parametrize("n", [1, 64])
def test_points_cannot_be_changed_by_who_gets_them(n: int) -> None:
    points = _points(tuple(f"r{index}" for index in range(n)))
    assert points.shape == (n, POINTS)
    assert not points.flags.writeable
