"""Columns of candidates: kept while nothing changes, changed row by row, and never behind the mirror."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvpool.directory import ReplicaLoad
from router.bookings import SETTLE_S
from router.roster import KEPT, Columns, Roster
from tests.router.scene import BLOCK_TOKENS, FRESH_S, Scene

ALL = ["r0", "r1", "r2"]


class Watched(Roster):
    """Counts how often it takes all pools anew."""

    def __init__(self, scene: Scene) -> None:
        self.looks = 0
        super().__init__(scene.mirror, BLOCK_TOKENS)

    def _look(self, now: float) -> None:
        self.looks += 1
        super()._look(now)


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    for number, name in enumerate(ALL):
        made.hear(name, held=[number], queued_prefill_tokens=number, running=10 * number)
    return made


def rows(columns: Columns) -> dict[str, tuple[int, int]]:
    """Load by replica."""
    loads = zip(columns.queued_tokens.tolist(), columns.running.tolist(), strict=True)
    return dict(zip(columns.candidates.replica_ids, loads, strict=True))


def test_candidates_keep_their_order_and_strangers_are_told_apart(scene: Scene) -> None:
    columns = Roster(scene.mirror, BLOCK_TOKENS).columns(["new", "r2", "r0"], scene.now)
    assert (columns.candidates.replica_ids, columns.candidates.unheard) == (("r2", "r0"), ("new",))
    assert rows(columns) == {"r2": (2, 20), "r0": (0, 0)}
    assert columns.settled_at.tolist() == [scene.now - SETTLE_S] * 2
    assert (columns.free_tokens.tolist(), columns.held_tokens.tolist()) == (
        [1000 * BLOCK_TOKENS] * 2,
        [BLOCK_TOKENS] * 2,
    )
    pools = {pool.replica_ids[0]: pool.slot for pool in scene.mirror.pools(scene.now)}
    assert columns.candidates.slots.tolist() == [pools["r2"], pools["r0"]]


def test_nothing_is_made_anew_while_nothing_changes(scene: Scene) -> None:
    roster = Watched(scene)
    first = roster.columns(ALL, scene.now)
    assert roster.columns(tuple(ALL), scene.now + 1.0) is first
    assert roster.columns(["r1"], scene.now) is not first
    assert roster.columns(ALL, scene.now) is first
    for number in range(KEPT):
        roster.columns(["r1"] * (number + 2), scene.now)
    assert roster.columns(ALL, scene.now) is not first  # of so many lists none is kept
    assert roster.looks == 1


def test_a_heartbeat_changes_its_own_rows_in_columns_of_their_own(scene: Scene) -> None:
    roster = Watched(scene)
    first, other = roster.columns(ALL, scene.now), roster.columns(["r0"], scene.now)
    scene.now += 1.0
    scene.hear("r1", queued_prefill_tokens=77, running=7)
    second = roster.columns(ALL, scene.now)
    assert rows(first) == {"r0": (0, 0), "r1": (1, 10), "r2": (2, 20)}
    assert rows(second) == {"r0": (0, 0), "r1": (77, 7), "r2": (2, 20)}
    assert second.settled_at.tolist() == [at - SETTLE_S for at in (scene.now - 1, scene.now, scene.now - 1)]
    assert roster.columns(["r0"], scene.now) is other
    assert roster.looks == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda scene: scene.hear_shared("p-r1", ReplicaLoad("r1"), ReplicaLoad("r9")),
        lambda scene: scene.hear_shared("p-r1"),
        lambda scene: scene.hear("r1", pool="another"),
        lambda scene: scene.hear("r9"),
    ],
    ids=["joins", "leaves", "moves", "comes"],
)
def test_what_is_more_than_load_is_seen_at_once(scene: Scene, change: Callable[[Scene], None]) -> None:
    roster = Watched(scene)
    roster.columns([*ALL, "r9"], scene.now)
    scene.now += 0.1
    change(scene)
    found = roster.columns([*ALL, "r9"], scene.now)
    fresh = Roster(scene.mirror, BLOCK_TOKENS).columns([*ALL, "r9"], scene.now)
    assert (found.candidates.replica_ids, found.candidates.slots.tolist()) == (
        fresh.candidates.replica_ids,
        fresh.candidates.slots.tolist(),
    )
    assert roster.looks == 2


def test_a_replica_goes_with_its_lease_and_comes_back_with_a_heartbeat(scene: Scene) -> None:
    roster = Roster(scene.mirror, BLOCK_TOKENS)
    roster.columns(ALL, scene.now)
    scene.now += FRESH_S - 0.1
    scene.hear("r0")
    scene.hear("r1")
    assert roster.columns(ALL, scene.now).candidates.replica_ids == tuple(ALL)
    scene.now += 0.2
    assert roster.columns(ALL, scene.now).candidates.replica_ids == ("r0", "r1")
    scene.hear("r2")
    assert roster.columns(ALL, scene.now).candidates.replica_ids == tuple(ALL)


def test_everyone_is_who_lives(scene: Scene) -> None:
    roster = Roster(scene.mirror, BLOCK_TOKENS)
    assert sorted(roster.everyone(scene.now).candidates.replica_ids) == ALL
    scene.now += FRESH_S + 1
    scene.hear("r1")
    assert roster.everyone(scene.now).candidates.replica_ids == ("r1",)


def test_whatever_happens_the_columns_are_those_of_a_new_roster(scene: Scene) -> None:
    roster, rng = Roster(scene.mirror, BLOCK_TOKENS), random.Random(5)
    lists = [ALL, ["r1", "new"], ["r2", "r0", "r3"]]
    for _ in range(400):
        scene.now += rng.choice([0.0, 0.01, FRESH_S / 3])
        name = rng.choice([*ALL, "r3"])
        scene.hear(name, pool=rng.choice(["", "", "", "shared"]), queued_prefill_tokens=rng.randrange(99))
        for candidates in rng.sample(lists, 2):
            found, fresh = (
                roster.columns(candidates, scene.now),
                Roster(scene.mirror, BLOCK_TOKENS).columns(candidates, scene.now),
            )
            assert (found.candidates.replica_ids, found.candidates.unheard) == (
                fresh.candidates.replica_ids,
                fresh.candidates.unheard,
            )
            assert found.candidates.slots.tolist() == fresh.candidates.slots.tolist()
            for column in ("queued_tokens", "running", "waiting", "free_tokens", "held_tokens"):
                assert getattr(found, column).tolist() == getattr(fresh, column).tolist(), column
            assert np.allclose(found.settled_at, fresh.settled_at)
