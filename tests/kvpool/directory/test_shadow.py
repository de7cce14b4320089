from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kvpool import words
from kvpool.control import Control
from kvpool.directory.messages import split_keys
from kvpool.directory.shadow import Changes, Shadow
from kvpool.words import EVICTING, INDEXED, NO_SLOT, SEALED
from tests.kvpool.conftest import Rig


@pytest.fixture
def control(rig: Rig) -> Iterator[Control]:
    view = rig.region.control()
    yield view
    view.release()


def indexed(control: Control) -> set[bytes]:
    return {control.key(block) for block, word in enumerate(control.state) if words.state_of(word) == INDEXED}


def test_a_chain_is_published_parents_first(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    rig.cache([1, 2, 3, 4, 5, 6])
    changes = shadow.scan(False, 100)
    assert changes == Changes((), tuple(rig.keys([1, 2, 3, 4, 5, 6])))
    assert shadow.packed() == b"".join(changes.added)
    assert not shadow.scan(True, 100)


def test_eviction_is_published_children_first(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    rig.cache([1, 2, 3, 4, 5, 6])
    shadow.scan(False, 100)
    rig.pool.evict(2)
    keys = rig.keys([1, 2, 3, 4, 5, 6])
    assert shadow.scan(False, 100) == Changes((keys[2], keys[1]), ())
    assert split_keys(shadow.packed()) == keys[:1]


def test_what_is_not_indexed_is_not_published(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    with rig.pool.table("r") as table:
        assert rig.pool.allocate(table, 2)
        assert not shadow.scan(True, 100)


def test_a_lost_bit_is_found_by_comparing_everything(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    shadow.scan(True, 100)
    rig.cache([1, 2])
    control.dirty[0] = 0
    assert not shadow.scan(False, 100)
    assert shadow.scan(True, 100).added == tuple(rig.keys([1, 2]))


def test_a_scan_stops_at_its_limit_and_goes_on(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    for start in range(0, 12, 2):
        rig.cache([start, start + 1])
    added = [shadow.scan(False, 2).added for _ in range(3)]
    assert [len(part) for part in added] == [2, 2, 2]
    assert shadow.pending <= 2
    assert not shadow.scan(True, 100)
    assert len(shadow) == 6


def test_a_region_that_was_warm_is_published_whole(rig: Rig, control: Control) -> None:
    rig.cache([1, 2, 3, 4])
    rig.cache([1, 2, 9, 9])
    control.dirty[0] = 0
    shadow = Shadow(control)
    assert set(shadow.scan(True, 100).added) == indexed(control)


def test_a_block_in_its_next_life_takes_all_below_it_along(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    old = rig.keys([1, 2, 3, 4])
    rig.cache([1, 2, 3, 4])
    shadow.scan(False, 100)
    rig.pool.reset()
    new = rig.keys([7, 8, 9, 9, 5, 5, 6, 6])
    rig.cache([7, 8, 9, 9, 5, 5, 6, 6])
    changes = shadow.scan(False, 100)
    assert changes.removed == (old[1], old[0])
    assert changes.added == tuple(new)


def test_a_key_that_moved_to_another_block_leaves_and_comes(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    (first,) = rig.cache([1, 2])
    shadow.scan(False, 100)
    rig.pool.reset()
    with rig.pool.table("other") as table:
        assert rig.pool.allocate(table, 5)  # takes the block, so that the key lands on another one
        (second,) = rig.cache([1, 2])
        assert second != first
        control.dirty[0] &= ~(1 << first)  # its end was not noticed yet
        changes = shadow.scan(False, 100)
    assert changes == Changes(tuple(rig.keys([1, 2])), tuple(rig.keys([1, 2])))
    assert split_keys(shadow.packed()) == rig.keys([1, 2])


def test_a_child_whose_end_was_not_noticed_leaves_before_its_parent(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    keys = rig.keys([1, 2, 3, 4, 5, 6])
    parent = rig.cache([1, 2, 3, 4, 5, 6])[0]
    shadow.scan(False, 100)
    rig.pool.reset()
    control.dirty[0] = 1 << parent
    assert shadow.scan(False, 100).removed == (keys[2], keys[1], keys[0])


class Restless:
    """A region's words that may change at every look: each access to the states lets something happen first."""

    def __init__(self, control: Control, happen: Callable[[], None]) -> None:
        self._control = control
        self._happen = happen
        self._busy = False

    def __getattr__(self, name: str) -> Any:
        if name in ("state", "parent") and not self._busy:
            self._busy = True
            self._happen()
            self._busy = False
        return getattr(self._control, name)


@pytest.mark.parametrize("seed", range(12))
def test_a_pool_that_changes_at_every_look(rig: Rig, control: Control, seed: int) -> None:
    """What the shadow says stays consistent and prefix-closed while the pool changes between any two of its reads."""
    rng = random.Random(seed)
    parent_of: dict[bytes, bytes] = {}
    calm = rng.choice((0.5, 0.9, 0.97))

    def happen() -> None:
        if rng.random() < calm:
            return
        if rng.random() < 0.4:
            rig.pool.evict(rng.randrange(1, 8))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.choice((2, 4, 6, 8)))]
            keys = rig.keys(tokens)
            parent_of.update(zip(keys[1:], keys, strict=False))
            rig.cache(tokens)

    view = cast(Control, Restless(control, happen))
    shadow = Shadow(view)
    held: set[bytes] = set()
    for turn in range(150):
        changes = shadow.scan(turn % 20 == 0, rng.choice((1, 4, 100)))
        for key in changes.removed:
            held.remove(key)
            assert not any(parent_of.get(other) == key for other in held)
        for key in changes.added:
            assert key not in held
            assert key not in parent_of or parent_of[key] in held
            held.add(key)
        assert set(split_keys(shadow.packed())) == held
    calm = 1.0
    for _ in range(40):
        changes = shadow.scan(True, 100)
        held = held - set(changes.removed) | set(changes.added)
    assert held == indexed(control)


def test_an_evicting_block_is_left_as_it_is(rig: Rig, control: Control) -> None:
    rig.damaged = True
    shadow = Shadow(control)
    (block,) = rig.cache([1, 2])
    shadow.scan(False, 100)
    word = control.state[block]
    control.state[block] = words.moved(word, EVICTING, 0)
    assert not shadow.scan(True, 100)
    assert len(shadow) == 1
    fresh = Shadow(control)
    assert not fresh.scan(True, 100)
    control.state[block] = words.moved(control.state[block], INDEXED, NO_SLOT)
    assert not shadow.scan(True, 100)
    assert fresh.scan(True, 100).added == tuple(rig.keys([1, 2]))


def test_a_child_is_published_under_a_listed_parent_that_somebody_tries_to_evict(rig: Rig, control: Control) -> None:
    """The parent has an indexed child, so the try will be taken back; nobody waits for that."""
    rig.damaged = True
    shadow = Shadow(control)
    (parent,) = rig.cache([1, 2])
    shadow.scan(False, 100)
    rig.cache([1, 2, 3, 4])
    word = control.state[parent]
    control.state[parent] = words.moved(word, EVICTING, 0)
    assert shadow.scan(False, 100) == Changes((), (rig.keys([1, 2, 3, 4])[1],))
    control.state[parent] = word
    assert not shadow.scan(True, 100)
    assert set(split_keys(shadow.packed())) == indexed(control)


def test_one_that_was_evicting_when_it_was_first_seen_is_found_without_a_bit(rig: Rig, control: Control) -> None:
    """Taking it back sets none, because for those who look at the index nothing has changed."""
    rig.damaged = True
    (block,) = rig.cache([1, 2])
    word = control.state[block]
    control.state[block] = words.moved(word, EVICTING, 0)
    shadow = Shadow(control)
    assert not shadow.scan(True, 100)
    control.state[block] = word
    assert not shadow.scan(False, 100)
    assert shadow.scan(True, 100).added == tuple(rig.keys([1, 2]))


def test_what_happens_outside_of_the_index_is_not_looked_at(rig: Rig, control: Control) -> None:
    shadow = Shadow(control)
    rig.cache([1, 2])
    shadow.scan(True, 100)
    lives = [words.generation_of(word) for word in control.state]
    for _ in range(3):
        with rig.pool.table("r") as table:
            assert rig.pool.allocate(table, 5)
            control.array("dirty")[:] = 0  # nobody need set a bit for this
            shadow.scan(True, 0)
            assert shadow.pending == 0
    control.array("dirty")[:] = 0
    shadow.scan(True, 0)
    assert shadow.pending == 0
    assert [words.generation_of(word) for word in control.state] != lives


@pytest.mark.parametrize("state", sorted(words.STATE_NAMES))
@pytest.mark.parametrize("was_listed", [True, False])
@pytest.mark.parametrize("next_life", [True, False])
def test_a_block_is_looked_at_when_it_is_not_listed_as_it_is(
    rig: Rig, control: Control, state: int, was_listed: bool, next_life: bool
) -> None:
    """The comparison of all words, for every state: in the life that is listed, in the next one, and unlisted."""
    rig.damaged = True
    shadow = Shadow(control)
    (block,) = rig.cache([1, 2])
    if was_listed:
        shadow.scan(True, 100)
    control.array("dirty")[:] = 0
    owner = NO_SLOT if state in (words.FREE, INDEXED) else 0
    control.state[block] = words.pack(state, owner, words.generation_of(control.state[block]) + next_life)
    shadow.scan(True, 0)
    may_be_listed = state in (INDEXED, EVICTING)
    differs = not (may_be_listed and not next_life) if was_listed else may_be_listed
    assert shadow.pending == differs
    shadow.scan(False, 100)
    assert len(shadow) == (state == INDEXED or (state == EVICTING and was_listed and not next_life))


def test_a_child_whose_parent_moves_waits(rig: Rig, control: Control) -> None:
    rig.damaged = True
    parent, child = rig.cache([1, 2, 3, 4])
    word = control.state[parent]
    control.state[parent] = words.pack(SEALED, 0, words.generation_of(word))
    shadow = Shadow(control)
    assert not shadow.scan(True, 100)
    assert shadow.pending == 1
    control.state[parent] = word
    assert shadow.scan(False, 100).added == tuple(rig.keys([1, 2, 3, 4]))
    assert child != parent


def test_two_living_blocks_with_one_key_are_published_once(rig: Rig, control: Control) -> None:
    rig.damaged = True
    shadow = Shadow(control)
    (first,) = rig.cache([1, 2])
    shadow.scan(False, 100)
    (second,) = rig.cache([3, 4])
    control.set_key(second, control.key(first))
    assert not shadow.scan(True, 100)
    assert split_keys(shadow.packed()) == rig.keys([1, 2])


@pytest.mark.parametrize("link", [1 << 32 | 999, 1 << 32 | 1, 5 << 32 | 1, 3 << 32])
def test_damaged_links_end_nowhere(rig: Rig, control: Control, link: int) -> None:
    rig.damaged = True
    (block,) = rig.cache([1, 2])
    assert block == 0
    control.parent[0] = link
    shadow = Shadow(control)
    assert not shadow.scan(True, 100)
    assert len(shadow) == 0


def test_any_order_of_requests_is_followed(rig: Rig, control: Control) -> None:
    rng = random.Random(4)
    shadow = Shadow(control)
    mirror: list[bytes] = []
    for _ in range(400):
        if rng.random() < 0.3:
            rig.pool.evict(rng.randrange(4))
        else:
            rig.cache([rng.randrange(2) for _ in range(rng.choice((2, 4, 6, 8)))])
        if rng.random() < 0.5:
            changes = shadow.scan(rng.random() < 0.1, rng.choice((1, 3, 100)))
            assert set(changes.removed) <= set(mirror)
            mirror = [key for key in mirror if key not in changes.removed]
            assert not set(changes.added) & set(mirror)
            mirror += changes.added
    while shadow.pending or shadow.scan(True, 100):
        shadow.scan(True, 100)
    assert set(split_keys(shadow.packed())) == indexed(control)
