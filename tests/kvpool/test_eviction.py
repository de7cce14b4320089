from __future__ import annotations

from typing import TYPE_CHECKING

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
    assert rig.region.control().children[head] == 0


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


def test_the_heap_stays_bounded(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=4)
    for _ in range(200):
        rig.cache([1, 2, 3, 4])
        assert len(rig.pool._eviction) <= 16
    assert rig.pool.evict(4) == 2


def test_the_heap_is_rebuilt_when_it_was_lost(rig: Rig) -> None:
    rig.cache([1, 2, 3, 4])
    rig.cache([5, 6])
    rig.pool._eviction._heap.clear()
    assert rig.pool.evict(1) == 1
    assert cached(rig, [1, 2, 3, 4]) == 1
    assert rig.pool.evict(9) == 2


def test_a_full_pool_does_not_scan_per_block(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=64)
    scans = 0
    rebuild = type(rig.pool._eviction)._rebuild

    def counted() -> None:
        nonlocal scans
        scans += 1
        rebuild(rig.pool._eviction)

    for token in range(32):
        rig.cache([token, token, token, token])
    type(rig.pool._eviction)._rebuild, restore = (lambda self: counted()), rebuild  # type: ignore[method-assign]
    try:
        for token in range(100, 200):
            rig.cache([token, token, token, token])
    finally:
        type(rig.pool._eviction)._rebuild = restore  # type: ignore[method-assign]
    assert rig.pool.stats().evictions == 200
    assert scans <= 1


def test_an_objection_puts_the_block_back(rig: Rig) -> None:
    """Another slot's bit appears after the candidate was chosen: the evictor looks again and leaves it."""
    (block,) = rig.cache([1, 2])
    control = rig.region.control()
    control.holders[block] = 1 << 7
    assert rig.pool._eviction._evict_block(block) is False
    control.holders[block] = 0
    control.release()
    assert cached(rig, [1, 2]) == 1
    assert rig.pool.evict(1) == 1
