from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool.words import INDEXED, SEALED

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig

CLASH = b"sixteen bytes..."


def test_t13_only_sealed_blocks_are_matchable(rig: Rig) -> None:
    """A block is being written and its request fails: the second request never sees it."""
    tokens = [1, 2, 3, 4]
    first = rig.pool.table("first")
    assert rig.pool.allocate(first, 2)
    rig.pool.seal(first, 0, rig.keys(tokens)[0], [1, 2])
    second = rig.pool.table("second")
    assert rig.pool.match(second, rig.keys(tokens)) == 1
    rig.pool.force_release(first, "step failed")
    third = rig.pool.table("third")
    assert rig.pool.match(third, rig.keys(tokens)) == 1
    rig.pool.release(second)
    rig.pool.release(third)


def test_t14_an_evicted_and_reused_block_does_not_match_its_old_key(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=2)
    old = rig.cache([1, 2, 3, 4])
    new = rig.cache([5, 6, 7, 8])
    assert sorted(old) == sorted(new)
    table = rig.pool.table("r")
    assert rig.pool.match(table, rig.keys([1, 2, 3, 4])) == 0
    assert rig.pool.match(table, rig.keys([5, 6, 7, 8])) == 2
    rig.pool.release(table)


def test_t18_equal_keys_with_other_tokens_are_a_miss(rig: Rig) -> None:
    first = rig.pool.table("first")
    assert rig.pool.allocate(first, 1)
    rig.pool.seal(first, 0, CLASH, [1, 2])
    second = rig.pool.table("second")
    assert rig.pool.match(second, [CLASH], [3, 4]) == 0
    assert rig.pool.stats().hash_collisions == 1
    assert rig.pool.match(second, [CLASH], [1, 2]) == 1
    rig.pool.release(first)
    rig.pool.release(second)


def test_t18_sealing_under_a_taken_key_stays_private(rig: Rig) -> None:
    first, second = rig.pool.table("first"), rig.pool.table("second")
    assert rig.pool.allocate(first, 1)
    rig.pool.seal(first, 0, CLASH, [1, 2])
    assert rig.pool.allocate(second, 2)
    own = second.blocks[0]
    assert rig.pool.seal(second, 0, CLASH, [3, 4]) == own
    # Its child cannot be indexed either: the parent is not.
    child = second.blocks[1]
    assert rig.pool.seal(second, 1, b"k" * 16, [5, 6]) == child
    stats = rig.pool.stats()
    assert (stats.blocks["sealed"], stats.hash_collisions, stats.dedups) == (2, 1, 0)
    assert rig.pool.peek([b"k" * 16]) == 0
    assert rig.pool.check_integrity() == ""
    rig.pool.release(second)
    rig.pool.release(first)
    assert rig.pool.stats().blocks["cached"] == 1


def test_t18_the_parent_is_compared_too(rig: Rig) -> None:
    """A chain made of one repeated key would visit one block twice if only keys were compared."""
    first = rig.pool.table("first")
    assert rig.pool.allocate(first, 1)
    rig.pool.seal(first, 0, CLASH, [1, 2])
    second = rig.pool.table("second")
    assert rig.pool.match(second, [CLASH, CLASH]) == 1
    assert rig.pool.peek([CLASH, CLASH]) == 1
    assert len(set(second.blocks)) == 1
    rig.pool.release(first)
    rig.pool.release(second)


def test_a_key_indexed_by_another_meanwhile_is_shared(rig: Rig) -> None:
    tokens = [1, 2, 3, 4]
    keys = rig.keys(tokens)
    one, other = rig.pool.table("one"), rig.pool.table("other")
    assert rig.pool.allocate(one, 2)
    assert rig.pool.allocate(other, 2)
    for position in range(2):
        ids = tokens[2 * position : 2 * position + 2]
        first = rig.pool.seal(one, position, keys[position], ids)
        assert rig.pool.seal(other, position, keys[position], ids) == first
    assert one.blocks == other.blocks
    stats = rig.pool.stats()
    assert (stats.dedups, stats.blocks["held"], stats.blocks["mutable"], stats.peak_holders) == (2, 2, 0, 2)
    rig.pool.release(one)
    assert rig.pool.held_blocks() == 2
    rig.pool.release(other)
    assert rig.pool.held_blocks() == 0


def test_child_counts_follow_the_index(rig: Rig) -> None:
    head = rig.cache([1, 2, 3, 4])[0]
    rig.cache([1, 2, 5, 6])
    control = rig.region.control()
    assert control.children[head] & 0xFFFFFFFF == 2
    assert [control.parent[block] >> 32 for block in rig.cache([1, 2, 3, 4, 9, 9])] == [0, 1, 2]
    rig.pool.reset()
    assert control.children[head] & 0xFFFFFFFF == 0
    control.release()


def test_what_is_stored_at_a_sealed_block(rig: Rig) -> None:
    table = rig.run("r", [1, 2, 3])
    block, tail = table.blocks
    control = rig.region.control()
    assert control.tokens(block) == bytes([1, 0, 0, 0, 2, 0, 0, 0])
    assert control.key(block) == rig.keys([1, 2])[0]
    assert (control.filled[block], control.filled[tail]) == (2, 0)
    assert (control.label(block), control.label(tail)) == ("r", "r")
    control.release()
    rig.pool.release(table)


@pytest.mark.parametrize("state", [SEALED, INDEXED])
def test_a_chain_ends_where_a_block_is_not_indexed(rig: Rig, state: int) -> None:
    blocks = rig.cache([1, 2, 3, 4])
    control = rig.region.control()
    word = control.state[blocks[1]]
    control.state[blocks[1]] = word & ~0xFF | state
    table = rig.pool.table("r")
    expected = 2 if state == INDEXED else 1
    assert rig.pool.peek(rig.keys([1, 2, 3, 4])) == expected
    control.state[blocks[1]] = word
    assert rig.pool.match(table, rig.keys([1, 2, 3, 4])) == 2
    control.release()
    rig.pool.release(table)
