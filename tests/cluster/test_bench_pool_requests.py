"""What the pool benchmark does to a pool, on a real one: it leaves nothing behind, and says when there is no room."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from cluster.bench import pool_requests
from cluster.bench.pool_plan import PAIR_BLOCKS
from cluster.bench.pool_requests import BATCH_PAIRS, Batch, Refused, hold, prompt, room, run
from cluster.bench.python_pool import PythonPool
from kvpool import BlockGeometry, Pool, Region

GEOMETRY = BlockGeometry(1, 1, 4, 4, "float32")
MakePool = Callable[[int], Pool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    """Makes a pool of so many blocks."""
    pools: list[tuple[Region, Pool]] = []

    def make(blocks: int) -> Pool:
        region = Region.create(tmp_path, f"pool-{len(pools)}", GEOMETRY, blocks, bytes(32), random.Random(1))
        pools.append((region, Pool.create(region)))
        return pools[-1][1]

    yield make
    for region, pool in pools:
        assert pool.check_integrity() == ""
        pool.close()
        region.close()


@pytest.fixture
def make_batch(tmp_path: Path, make_pool: MakePool) -> Iterator[Callable[[str, int], Batch]]:
    """Makes each kind of pairs over so many blocks."""
    lock_fd = os.open(tmp_path / "lock", os.O_RDONLY | os.O_CREAT)
    kinds = {
        "pool": lambda blocks: pool_requests.pool_pairs(make_pool(blocks)),
        "flock": lambda blocks: pool_requests.locked_pairs(make_pool(blocks), lock_fd),
        "python": lambda blocks: pool_requests.python_pairs(PythonPool(blocks)),
    }
    yield lambda kind, blocks: kinds[kind](blocks)
    os.close(lock_fd)


@pytest.mark.parametrize("kind", ["pool", "flock", "python"])
def test_pairs_go_on_for_ever(make_batch: Callable[[str, int], Batch], kind: str) -> None:
    batch = make_batch(kind, PAIR_BLOCKS)  # a leak of one block would be refused at once
    batch()
    batch()


@pytest.mark.parametrize("kind", ["pool", "flock", "python"])
def test_pairs_need_room(make_batch: Callable[[str, int], Batch], kind: str) -> None:
    with pytest.raises(Refused, match=f"{PAIR_BLOCKS - 1} blocks"):
        make_batch(kind, PAIR_BLOCKS - 1)()


def test_pairs_take_what_they_say(make_pool: MakePool) -> None:
    pool = make_pool(64)
    pool_requests.pool_pairs(pool)()
    assert sum(pool.stats().allocations.values()) == PAIR_BLOCKS * BATCH_PAIRS
    assert pool.held_blocks() == 0


def test_nobody_holds_the_lock_afterwards(make_pool: MakePool, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    ours, theirs = (os.open(path, os.O_RDONLY | os.O_CREAT) for _ in range(2))
    for blocks in (PAIR_BLOCKS, 1):
        batch = pool_requests.locked_pairs(make_pool(blocks), ours)
        if blocks == 1:
            with pytest.raises(Refused):
                batch()
        else:
            batch()
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(theirs, fcntl.LOCK_UN)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(("start_ns", "stop_ns", "batches"), [(10, 13, 2), (0, 5, 3), (0, 0, 1)])
def test_a_run_begins_and_ends_in_time(start_ns: int, stop_ns: int, batches: int) -> None:
    """A clock that goes on by one at each look: waiting, the first look, one look after each batch."""
    done: list[None] = []
    ticks = count(1)
    span = run(lambda: done.append(None), start_ns, stop_ns, lambda: next(ticks))
    assert len(done) == batches
    assert span.pairs == batches * BATCH_PAIRS
    assert span.last_ns - span.first_ns == batches
    assert span.first_ns >= start_ns


def test_a_prompt_that_is_held_can_be_matched(make_pool: MakePool) -> None:
    pool = make_pool(16)
    asked, other = prompt(pool, 3), prompt(pool, 3)
    with hold(pool, asked, 2) as table:
        assert (len(table.blocks), len(table.keys), pool.peek(asked.keys), pool.peek(other.keys)) == (5, 3, 3, 0)
    with pytest.raises(Refused):
        hold(pool, prompt(pool, 12), 5)


def test_the_room_is_what_is_really_given(make_pool: MakePool) -> None:
    pool = make_pool(23)
    assert room(pool) == 23
    hold(pool, prompt(pool, 9)).close()
    assert room(pool) == 23  # cached blocks give way
    with hold(pool, prompt(pool, 5), 2):
        assert room(pool) == 16
