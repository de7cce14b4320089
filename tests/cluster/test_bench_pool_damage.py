"""Damage made on purpose: the integrity check sees it, and a tidy pass leaves none of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.bench import pool_damage
from cluster.bench.pool_requests import hold, prompt
from kvpool import BlockGeometry, Pool, Region, layout, words
from kvpool.control import Control

Scene = tuple[Pool, Control]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A pool of 64 blocks with a window on its control part; whole at the end."""
    geometry = BlockGeometry(1, 1, 4, 4, "float32")
    with Region.create(tmp_path, "scene", geometry, 64, bytes(32), random.Random(1)) as region:
        control = region.control()
        with Pool.create(region) as pool:
            yield pool, control
            assert pool.check_integrity() == ""
        control.release()


def _dead(scene: Scene) -> None:
    pool_damage.dead_slot(scene[1], 5, pool_damage.free_blocks(scene[1])[:10])


def _bits(scene: Scene) -> None:
    pool_damage.lose_bits(scene[1], pool_damage.free_blocks(scene[1])[:10])


def _counts(scene: Scene) -> None:
    with hold(scene[0], prompt(scene[0], 3)) as table:
        blocks = list(table.blocks)
    pool_damage.raise_counts(scene[1], blocks)


@pytest.mark.parametrize("damage", [_dead, _bits, _counts])
def test_one_pass_puts_it_right(scene: Scene, damage: Callable[[Scene], None]) -> None:
    pool, control = scene
    damage(scene)
    assert not _is_sound(control)
    pool.tidy()
    assert _is_sound(control)
    pool.reset()
    assert len(pool_damage.free_blocks(control)) + pool.stats().blocks["local"] == 64


def _is_sound(control: Control) -> bool:
    """Free blocks have their bits, owners their slots, and no more children are counted than there are."""
    free = set(pool_damage.free_blocks(control))
    bits = {block for block in range(64) if control.free[block >> 6] >> (block & 63) & 1}
    owners = {words.owner_of(control.state[block]) for block in range(64)}
    counted = sum(
        control.children[block] & 0xFFFFFFFF for block in range(64) if _state(control, block) == words.INDEXED
    )
    below = sum(
        control.parent[block] & 0xFFFFFFFF != 0 for block in range(64) if _state(control, block) == words.INDEXED
    )
    return free == bits and 5 not in owners and counted == below


def _state(control: Control, block: int) -> int:
    return words.state_of(control.state[block])


def test_nothing_enters_a_crowded_index(scene: Scene) -> None:
    pool, control = scene
    before = prompt(pool, 2)
    with hold(pool, before), pool_damage.crowd_index(control):
        assert pool.peek(before.keys) == 2  # what is in stays in
        asked = prompt(pool, 3)
        with hold(pool, asked) as table:
            assert {_state(control, block) for block in table.blocks} == {words.SEALED}
            assert pool.peek(asked.keys) == 0
    assert sum(entry != layout.INDEX_EMPTY for entry in control.index) == 2
    with hold(pool, asked):
        assert pool.peek(asked.keys) == 3


@pytest.mark.parametrize("damage", [pool_damage.lose_bits, pool_damage.raise_counts])
def test_only_blocks_in_their_state_are_damaged(scene: Scene, damage: Callable[[Control, list[int]], None]) -> None:
    pool, control = scene
    with pool.table("request") as table:
        pool.allocate(table, 1)
        with pytest.raises(AssertionError):
            damage(control, list(table.blocks))
