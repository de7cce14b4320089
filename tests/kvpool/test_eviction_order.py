"""Which cached blocks an eviction takes, in which order, and which it never takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import Pool, Region, words

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


def cached(rig: Rig, tokens: list[int]) -> int:
    return rig.pool.peek(rig.keys(tokens))


def test_oldest_first(rig: Rig) -> None:
    rig.cache([1, 1])
    rig.cache([2, 2])
    rig.cache([3, 3])
    rig.cache([1, 1])  # used again: now the youngest
    assert rig.pool.evict(1) == 1
    assert [cached(rig, [token] * 2) for token in (1, 2, 3)] == [1, 0, 1]
    assert rig.pool.evict(1) == 1
    assert [cached(rig, [token] * 2) for token in (1, 2, 3)] == [1, 0, 0]


def test_a_prefix_loses_its_tail_first_and_parents_follow_in_one_call(rig: Rig) -> None:
    rig.cache([1, 2, 3, 4, 5, 6])
    assert rig.pool.evict(1) == 1
    assert cached(rig, [1, 2, 3, 4, 5, 6]) == 2
    assert rig.pool.evict(5) == 2
    assert cached(rig, [1, 2, 3, 4, 5, 6]) == 0


def test_a_shared_head_stays_while_a_branch_is_there(rig: Rig) -> None:
    head = rig.cache([1, 2, 3, 4])[0]
    rig.cache([1, 2, 5, 6])
    assert rig.pool.evict(1) == 1
    assert cached(rig, [1, 2, 3, 4]) == 1
    assert cached(rig, [1, 2, 5, 6]) == 2
    assert rig.pool.evict(9) == 2
    control = rig.region.control()
    assert control.children[head] & 0xFFFFFFFF == 0
    control.release()


def test_at_equal_times_the_deeper_leaf_goes_first(rig: Rig) -> None:
    """Both tails were used at the same instant; the one at depth 2 goes before the one at depth 1."""
    short, long = rig.run("short", [1, 2, 3, 4]), rig.run("long", [9, 9, 8, 8, 7, 7])
    rig.pool.release(short)
    rig.pool.release(long)
    assert rig.pool.evict(1) == 1
    assert cached(rig, [9, 9, 8, 8, 7, 7]) == 2
    assert cached(rig, [1, 2, 3, 4]) == 2


def test_held_blocks_are_never_evicted(rig: Rig) -> None:
    table = rig.run("r", [1, 2, 3, 4])
    rig.cache([5, 6])
    assert rig.pool.evict(9) == 1
    assert cached(rig, [1, 2, 3, 4]) == 2
    rig.pool.release(table)
    assert rig.pool.stats().evicted_while_held == 0


def test_reset_drops_the_idle_and_keeps_the_held(rig: Rig) -> None:
    table = rig.run("r", [1, 2])
    rig.cache([1, 2, 3, 4])
    rig.cache([5, 6])
    assert rig.pool.reset() == 2
    assert cached(rig, [1, 2, 3, 4]) == 1
    rig.pool.release(table)
    assert rig.pool.reset() == 1
    assert rig.pool.stats().blocks["cached"] == 0


def test_the_order_stays_right_while_candidates_come_and_go(make_rig: MakeRig) -> None:
    """Blocks are used again after they were candidates, and leave in between: the oldest still goes first."""
    rig = make_rig(capacity_blocks=32)
    for token in range(8):
        rig.cache([token, token])
    assert rig.pool.evict(1) == 1  # from here on the others are known candidates
    for token in (1, 3, 5):
        rig.cache([token, token])
    rig.cache([9, 9])
    for expected in (2, 4, 6, 7, 1, 3, 5, 9):
        before = {token for token in range(10) if cached(rig, [token, token])}
        assert rig.pool.evict(1) == 1
        assert before - {token for token in range(10) if cached(rig, [token, token])} == {expected}
    assert rig.pool.evict(1) == 0


def test_allocation_evicts_in_the_same_order(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=3)
    for token in (1, 2, 3):
        rig.cache([token, token])
    rig.cache([1, 1])
    with rig.pool.table("r") as table:
        assert rig.pool.allocate(table, 2)
        assert [cached(rig, [token] * 2) for token in (1, 2, 3)] == [1, 0, 0]


def test_an_evicted_block_begins_a_new_life(make_rig: MakeRig) -> None:
    """Also when it goes straight into the hands of the request that needed it."""
    rig = make_rig(capacity_blocks=1)
    (block,) = rig.cache([1, 1])
    control = rig.region.control()
    before = words.generation_of(control.state[block])
    with rig.pool.table("r") as table:
        assert rig.pool.allocate(table, 1)
        assert words.generation_of(control.state[block]) == before + 1
    rig.cache([2, 2])
    before = words.generation_of(control.state[block])
    assert rig.pool.evict(1) == 1
    assert words.generation_of(control.state[block]) == before + 1
    control.release()


def test_one_prompt_for_ever(make_rig: MakeRig) -> None:
    """What is cached and used again thousands of times is evicted once, and found until then."""
    rig = make_rig(capacity_blocks=4)
    for _ in range(1000):
        rig.cache([1, 2, 3, 4])
    assert rig.pool.evict(4) == 2
    assert rig.pool.stats().evictions["idle"] == 2


def test_what_another_process_holds_is_not_evicted(rig: Rig) -> None:
    """Until it is released there, or that process is dead and reclaimed; and what it cached can be evicted here."""
    rig.cache([1, 2, 3, 4])
    region = Region.attach(rig.region.path)
    with Pool.create(region, clock=lambda: rig.now) as other:
        table = other.table("reader")
        assert other.match(table, rig.keys([1, 2])) == 1
        assert rig.pool.evict(9) == 1
        assert (cached(rig, [1, 2, 3, 4]), rig.pool.available(), rig.pool.held_blocks()) == (1, 7, 0)
        other.release(table)
        assert rig.pool.evict(9) == 1
        assert rig.pool.stats().evicted_while_held == other.stats().evicted_while_held == 0
    region.close()


def test_a_block_read_by_a_process_that_died_counts_as_used_then(rig: Rig) -> None:
    rig.cache([1, 1])
    rig.cache([2, 2])
    region = Region.attach(rig.region.path)
    other = Pool.create(region, clock=lambda: rig.now)
    assert other.match(other.table("reader"), rig.keys([1, 1])) == 1
    rig.tick()
    region.close()  # and with it the lock on the slot: that is what a death looks like
    assert rig.pool.evict(9) == 1  # [2, 2]; the other is held until somebody looks for the dead
    rig.cache([3, 3])
    assert [gone.slot for gone in rig.pool.reclaim()] == [other.slot]
    assert rig.pool.evict(1) == 1
    assert [cached(rig, [token] * 2) for token in (1, 2, 3)] == [0, 0, 1]
