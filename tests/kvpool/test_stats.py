from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvpool import Pool, Region
from kvpool.stats import region_totals

if TYPE_CHECKING:
    from tests.kvpool.conftest import Rig


def test_t41_conditions_sum_to_the_capacity_and_stay_in_range(rig: Rig) -> None:
    tables = [rig.run("one", [1, 2, 3]), rig.run("two", [1, 2, 4, 4, 5])]
    rig.cache([7, 7])
    for _ in range(4):
        stats = rig.pool.stats()
        assert sum(stats.blocks.values()) == stats.capacity_blocks == 8
        assert all(0 <= count <= 8 for count in stats.blocks.values())
        assert stats.used_blocks == rig.pool.held_blocks()
        if tables:
            rig.pool.release(tables.pop())
        rig.pool.evict(1)


def test_t41_a_snapshot_sums_up_while_others_work(rig: Rig) -> None:
    region = Region.attach(rig.region.path)
    other = Pool.create(region)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with other.table("r") as table:
                other.allocate(table, 4)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(300):
            blocks = rig.pool.stats().blocks
            assert sum(blocks.values()) == 8
            assert min(blocks.values()) >= 0
    finally:
        stop.set()
        worker.join()
    other.close()
    region.close()


def test_every_condition_is_counted(rig: Rig) -> None:
    table = rig.run("r", [1, 2, 3])  # held + mutable
    other = rig.pool.table("other")
    assert rig.pool.allocate(other, 2)
    rig.pool.seal(other, 0, rig.keys([1, 2])[0], [9, 9])  # another content under that key: sealed
    rig.cache([5, 5])  # cached
    spare = rig.pool.table("spare")
    assert rig.pool.allocate(spare, 1)
    rig.pool.release(spare)  # local
    assert rig.pool.stats().blocks == {"free": 2, "local": 1, "mutable": 2, "sealed": 1, "held": 1, "cached": 1}
    assert rig.pool.stats().open_tables == 2
    rig.pool.release(table)
    rig.pool.release(other)


def test_allocations_by_source(rig: Rig) -> None:
    rig.cache([1, 2])
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 2)
    rig.pool.release(table)
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 8)
    stats = rig.pool.stats()
    assert stats.allocations == {"local": 2, "free": 1 + 2 + 5, "evict": 1}
    assert (stats.alloc_peak, stats.alloc_mean) == (8, 11 / 3)
    assert (stats.used_peak, stats.used_mean) == (8, 11 / 3)
    assert stats.evictions == {"idle": 1, "waiting": 0}
    assert not rig.pool.allocate(table, 1)
    assert rig.pool.stats().allocation_failures == {"full": 1, "owed": 0}
    rig.pool.release(table)


def test_prefix_tokens_are_counted_once_per_request(rig: Rig) -> None:
    rig.pool.count_prefix(100, 64)
    rig.pool.count_prefix(10, 0)
    stats = rig.pool.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (110, 64)
    with pytest.raises(ValueError, match="11 of 10 tokens cannot be hits"):
        rig.pool.count_prefix(10, 11)


def test_a_fresh_pool_has_no_mean_to_divide_by(rig: Rig) -> None:
    stats = rig.pool.stats()
    assert (stats.alloc_mean, stats.used_mean, stats.peak_holders) == (0.0, 0.0, 0)


def test_a_snapshot_does_not_change_afterwards(rig: Rig) -> None:
    before = rig.pool.stats()
    table = rig.run("r", [1, 2])
    rig.pool.force_release(table, "test")
    assert before.forced_releases == {}
    assert before.blocks["free"] == 8


def test_how_long_blocks_live_lie_idle_and_wait_for_their_next_use(rig: Rig) -> None:
    ms = 1_000_000
    blocks = rig.cache([1, 2, 3, 4])
    rig.now += 5 * ms
    rig.pool.release(rig.run("again", [1, 2, 3, 4]))
    rig.now += 100 * ms
    assert rig.pool.evict(2) == len(blocks) == 2
    stats = rig.pool.stats()
    assert stats.reuse_gap.counts[2] == stats.reuse_gap.total == 2  # 4 to 8 units of about a millisecond
    assert stats.idle_before_evict.counts[6] == stats.idle_before_evict.total == 2  # 64 to 128
    assert stats.lifetime.counts[6] == stats.lifetime.total == 2
    assert stats.lifetime.bounds_s()[6] == 128 * 2**20 / 1e9


def test_the_region_knows_what_all_did_also_those_who_left(rig: Rig) -> None:
    control = rig.region.control()
    with Region.attach(rig.region.path) as region, Pool.create(region) as pool, pool.table("r") as table:
        assert pool.allocate(table, 3)
        own = rig.run("own", [1, 2, 3, 4])
        stats = rig.pool.stats()
        totals = region_totals(control, stats.blocks)
        assert (stats.alloc_peak, totals.alloc_peak) == (2, 3)
        assert totals.allocations["free"] == 5
    assert region_totals(control, stats.blocks).allocations["free"] == 5
    control.release()
    rig.pool.release(own)
