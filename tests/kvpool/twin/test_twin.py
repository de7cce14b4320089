"""What the state machines do not come by: windows that are full, hints that are lost, deaths in the middle of a step."""

from __future__ import annotations

import pytest

from kvpool import PoolError
from tests.kvpool.twin.index import NOT_FOUND, WindowIndex
from tests.kvpool.twin.pool import TwinPool
from tests.kvpool.twin.table import TwinTable
from tests.kvpool.twin.twin import Twin
from tests.kvpool.twin.words import NOBODY, State, Word


def key(home: int, tag: int = 0) -> bytes:
    return home.to_bytes(8, "little") + tag.to_bytes(8, "little")


def sealed(pool: TwinPool, *names: bytes) -> TwinTable:
    """A request with one sealed block of one token for each name."""
    table = pool.table("r")
    assert pool.allocate(table, len(names))
    for position, name in enumerate(names):
        pool.seal(table, position, name, [position])
    return table


def test_a_generation_ends_with_the_content() -> None:
    word = Word().to(State.LOCAL, 3).to(State.MUTABLE, 3)
    assert word == Word(State.MUTABLE, 3, 0)
    assert word.to(State.LOCAL, 3).generation == word.to(State.FREE).generation == 1
    assert word.to(State.LOCAL, 3).to(State.FREE).generation == 1


@pytest.mark.parametrize(("state", "owner"), [(State.INDEXED, NOBODY), (State.LOCAL, NOBODY), (State.MUTABLE, NOBODY)])
def test_illegal_steps(state: State, owner: int) -> None:
    with pytest.raises(AssertionError):
        Word().to(state, owner)


def test_the_window() -> None:
    keys = {block: key(6, block) for block in range(4)}
    index = WindowIndex(8, lambda block: keys[block], window=3)
    assert [index.insert(keys[block], block) for block in range(4)] == [True, True, True, False]
    assert index.remove(keys[1], 1)
    assert not index.remove(keys[1], 1)
    assert [index.find(keys[block]) for block in range(4)] == [0, NOT_FOUND, 2, NOT_FOUND]
    assert index.insert(keys[3], 3)
    assert index.listed() == [2, 0, 3]


def test_what_found_no_window_is_indexed_late_with_what_follows_it() -> None:
    twin = Twin(8, 1)
    pool = twin.attach(0)
    entries = len(twin.memory.index.entries)
    twin.memory.index = WindowIndex(entries, lambda block: twin.memory.blocks[block].key, window=1)
    pool.release(sealed(pool, key(5, 0)))
    table = sealed(pool, key(5, 1), key(6))
    assert pool.stats().blocks["sealed"] == 2
    assert pool.tidy().late_indexed == 0
    assert pool.evict(1) == 1
    assert pool.tidy().late_indexed == 2
    assert pool.peek([key(5, 1), key(6)]) == 2
    assert twin.check() == ""
    pool.release(table)


def test_free_bits_are_hints() -> None:
    twin = Twin(4, 1)
    pool = twin.attach(0)
    table = pool.table("r")
    assert pool.allocate(table, 1)
    twin.memory.free_bits = set(table.blocks)  # one is stale, three are lost
    assert pool.allocate(table, 3)
    assert sorted(table.blocks) == [0, 1, 2, 3]
    twin.memory.free_bits = {1}
    assert pool.tidy().restored_bits == 0
    assert twin.check() == ""


@pytest.mark.parametrize("state", [State.EVICTING, State.FREEING])
@pytest.mark.parametrize("unindexed", [False, True])
def test_a_death_in_the_middle_of_an_eviction(state: State, unindexed: bool) -> None:
    """An eviction that was not past the point of no return is undone, any other is finished; the parent can go later."""
    twin = Twin(4, 1)
    pool, dying = twin.attach(0), twin.attach(1)
    table = sealed(pool, key(1), key(2))
    leaf = table.blocks[1]
    pool.release(table)
    block = twin.memory.blocks[leaf]
    block.word = block.word.to(State.EVICTING, dying.slot)
    if state is State.FREEING:
        block.word = block.word.to(State.FREEING, dying.slot)
        if unindexed:
            twin.memory.index.remove(block.key, leaf)
    twin.kill(1)
    assert twin.reclaim(1).blocks == ({"r": (leaf,)} if state is State.FREEING else {})
    assert pool.peek([key(1), key(2)]) == (2 if state is State.EVICTING else 1)
    assert twin.reclaim(1).blocks == {}
    assert pool.evict(4) == (2 if state is State.EVICTING else 1)
    assert pool.unused() == 4
    assert twin.check() == ""


def test_a_death_leaves_words_that_only_reclaiming_removes() -> None:
    twin = Twin(8, 1)
    pool, dying = twin.attach(0), twin.attach(1)
    shared = sealed(pool, key(1))
    reader = dying.table("reader")
    assert dying.match(reader, [key(1)]) == 1
    assert dying.allocate(reader, 2)
    other = dying.table("gone")
    assert dying.allocate(other, 1)
    assert dying.release(other) == 1
    pool.release(shared)
    twin.kill(1)
    assert (pool.evict(8), pool.available()) == (0, 4)
    with pytest.raises(PoolError, match="closed"):
        dying.allocate(reader, 1)
    (gone,) = pool.reclaim()
    assert gone.slot == 1
    assert {label: len(blocks) for label, blocks in gone.blocks.items()} == {"(no request)": 1, "reader": 2}
    assert (pool.available(), pool.evict(8), pool.unused()) == (8, 1, 8)


def test_damage_is_noticed() -> None:
    twin = Twin(4, 1)
    pool = twin.attach(0)
    table = sealed(pool, key(1), key(2))
    assert twin.check() == ""
    head, leaf = (twin.memory.blocks[number] for number in table.blocks)
    head.children = 0
    assert "counts 0 children, it has 1" in twin.check()
    head.children = 1
    leaf.holders.add(9)
    assert "a slot that nobody has" in twin.check()
    leaf.holders = set()
    assert "without its bit" in twin.check()
    leaf.holders = {0}
    twin.memory.free_bits.clear()
    assert "free bits" in twin.check()
