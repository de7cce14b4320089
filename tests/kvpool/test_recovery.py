from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvpool import BlockGeometry, KeyRoot, KeySpace, Pool, Region, words
from kvpool.layout import HEADER_WORDS
from kvpool.words import EVICTING, FREEING, MUTABLE
from tests.kvpool.conftest import FINGERPRINT

if TYPE_CHECKING:
    from kvpool.control import Control
    from tests.kvpool.conftest import Rig

DYING = """
import os, random, signal, sys
import kvpool
geometry = kvpool.BlockGeometry(1, 1, 4, 2, "float32")
region = kvpool.Region.create(sys.argv[1], "r", geometry, 8, bytes(32), random.Random(0))
pool = kvpool.Pool.create(region)
space = kvpool.KeySpace(bytes(32))
tokens = [1, 2, 3, 4, 5]
keys = space.block_keys(space.root(kvpool.KeyRoot("m", 2, "float32")), tokens, 2)
table = pool.table("doomed")
pool.allocate(table, 3)
for position in range(2):
    pool.seal(table, position, keys[position], tokens[2 * position : 2 * position + 2])
    region.kv_memory[table.blocks[position] * geometry.block_bytes] = 70 + position
done = pool.table("done")
pool.allocate(done, 2)
pool.release(done)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_warm_after_sigkill(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], env=environment).returncode == -9
    space = KeySpace(bytes(32))
    keys = space.block_keys(space.root(KeyRoot("m", 2, "float32")), [1, 2, 3, 4], 2)
    with Region.attach(tmp_path / "r") as region, Pool.create(region) as pool:
        assert pool.check_integrity() == ""
        assert pool.stats().blocks == {"free": 6, "local": 0, "mutable": 0, "sealed": 0, "held": 0, "cached": 2}
        assert pool.stats().reclaimed_blocks == 3  # one being filled, two in the local cache
        with pool.table("next") as table:
            assert pool.match(table, keys, [1, 2, 3, 4]) == 2
            size = region.geometry.block_bytes
            assert [region.kv_memory[block * size] for block in table.blocks] == [70, 71]
        assert pool.evict(9) == 2


def reopen(rig: Rig) -> Pool:
    """The pool as a process finds it that adopts the region, whatever was done to its words."""
    region = Region.adopt(rig.region.path, geometry=rig.geometry, fingerprint=FINGERPRINT, owner=rig.region.owner)
    assert region is not None
    return Pool.create(region)


def crash(rig: Rig) -> None:
    """Lets go of the region without putting anything in order."""
    rig.damaged = True
    rig.region.close()


@pytest.mark.parametrize("state", [EVICTING, FREEING, 0, 99])
def test_a_death_in_the_middle_of_an_eviction(rig: Rig, state: int) -> None:
    blocks = rig.cache([1, 2, 3, 4])
    control = rig.region.control()
    control.state[blocks[1]] = words.pack(state, 0, 5)
    crash(rig)
    pool = reopen(rig)
    assert pool.check_integrity() == ""
    assert pool.peek(rig.keys([1, 2, 3, 4])) == (2 if state == EVICTING else 1)
    assert pool.available() == 8
    pool.close()
    control.release()


@pytest.mark.parametrize("state", [FREEING, MUTABLE])
def test_children_of_a_lost_parent_go_too(rig: Rig, state: int) -> None:
    blocks = rig.cache([1, 2, 3, 4, 5, 6])
    control = rig.region.control()
    control.state[blocks[0]] = words.pack(state, 0, 5)
    crash(rig)
    pool = reopen(rig)
    assert pool.check_integrity() == ""
    assert pool.stats().blocks["free"] == 8
    assert words.generation_of(control.state[blocks[0]]) == 6
    pool.close()
    control.release()


def test_consequences_are_computed_anew(rig: Rig) -> None:
    blocks = rig.cache([1, 2, 3, 4])
    control = rig.region.control()
    control.children[blocks[0]] = 40
    control.holders[blocks[1]] = 1 << 60
    control.free[0] = 0
    for position in range(len(control.index)):
        control.index[position] = 0xFFFFFFFF
    crash(rig)
    pool = reopen(rig)
    assert pool.check_integrity() == ""
    assert pool.evict(9) == 2
    pool.close()
    control.release()


def damage(control: Control, rng: random.Random) -> None:
    for block in range(8):
        if rng.random() < 0.5:
            control.state[block] = words.pack(rng.choice([*words.STATE_NAMES, 0, 200]), rng.randrange(64), 3)
            control.parent[block] = rng.choice([0, 1 << 32 | rng.randrange(12), rng.getrandbits(64)])
            control.holders[block] = rng.getrandbits(64)
            control.children[block] = rng.getrandbits(64)
        control.set_key(block, rng.choice([bytes(16), rng.randbytes(16)]))
    control.free[0] = rng.getrandbits(64)
    control.index[rng.randrange(16)] = rng.getrandbits(64)
    for name in ("slots_used", "demand", "recount"):
        control.header[HEADER_WORDS[name]] = rng.getrandbits(64)


def test_any_damage_to_the_changing_words_is_survived(rig: Rig) -> None:
    """States, parents, holders, counts, bits and index entries set at random: a next life still starts whole."""
    rng = random.Random(5)
    rig.cache([1, 2, 3, 4, 5, 6])
    crash(rig)
    for _ in range(60):
        with Region.attach(rig.region.path) as region:
            control = region.control()
            damage(control, rng)
            control.release()
        pool = reopen(rig)
        assert pool.check_integrity() == ""
        assert pool.available() == 8
        pool.close()
        pool.region.close()


def test_an_untouched_region_needs_no_recovery(tmp_path: Path) -> None:
    geometry = BlockGeometry(1, 1, 4, 2, "float32")
    with Region.create(tmp_path, "r", geometry, 8, bytes(32), random.Random(0)) as region:
        for life in range(3):
            with Pool.create(region) as pool, pool.table("r") as table:
                assert pool.stats().reclaimed_processes == 0
                assert pool.allocate(table, 3 + life)
