"""Floors, tickets and demand, with several pools over one region in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool import BlockGeometry, BlockTable, Pool, Region

CAPACITY = 16
Join = Callable[[int], Pool]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Adds a process with that floor to a region of 16 blocks."""
    region = Region.create(tmp_path, "r", BlockGeometry(1, 1, 4, 2, "float32"), CAPACITY, bytes(32), random.Random(0))
    pools: list[Pool] = []

    def add(floor_blocks: int) -> Pool:
        pools.append(Pool.create(Region.attach(region.path), floor_blocks=floor_blocks))
        return pools[-1]

    yield add
    for pool in pools:
        assert pool.check_integrity() == ""
        pool.close()
        pool.region.close()
    region.close()


def take(pool: Pool, blocks: int) -> BlockTable:
    table = pool.table("r")
    assert pool.allocate(table, blocks)
    return table


def test_a_process_alone_owes_nothing(join: Join) -> None:
    with take(join(4), CAPACITY) as table:
        assert len(table) == CAPACITY


def test_what_others_lack_of_their_floors_is_theirs(join: Join) -> None:
    one, two = join(4), join(6)
    first = take(one, 10)
    table = one.table("more")
    assert not one.allocate(table, 1)
    assert one.stats().allocation_failures == {"full": 0, "owed": 1}
    second = take(two, 6)
    assert not two.allocate(second, 1)
    one.release(first)
    assert two.allocate(second, 6)  # all but the floor of the other
    assert not two.allocate(second, 1)
    assert one.allocate(table, 4)


def test_who_waits_is_served_before_those_who_came_later(join: Join) -> None:
    one, two = join(0), join(0)
    held = take(one, 12)
    two.wait_in_line(8)
    assert one.demand() == 4
    assert two.demand() == 0
    table = one.table("more")
    assert not one.allocate(table, 1)
    one.release(held)
    assert one.demand() == 0
    assert one.allocate(table, 8)  # what the other does not wait for
    assert not one.allocate(table, 1)
    with take(two, 8):
        two.leave_line()
        assert one.demand() == 0


def test_nobody_is_asked_to_go_below_the_floor(join: Join) -> None:
    one, two = join(5), join(5)
    take(one, 8)
    two.wait_in_line(11)
    assert one.demand() == 3
    two.wait_in_line(9)
    assert one.demand() == 1


def test_floors_do_not_count_when_the_oldest_needs_more_than_they_leave(join: Join) -> None:
    one, two = join(6), join(6)
    held = take(one, 6)
    two.wait_in_line(14)
    assert one.demand() == 4
    table = one.table("more")
    one.release(held)
    assert not one.allocate(table, 3)
    assert one.allocate(table, 2)
    one.release(table)
    with take(two, 14):
        two.leave_line()


def test_the_older_ticket_wins_and_is_kept(join: Join) -> None:
    one, two, three = join(0), join(0), join(0)
    held = take(three, CAPACITY)
    one.wait_in_line(10)
    two.wait_in_line(4)
    one.wait_in_line(12)  # wants more by now, and is still the first
    assert (one.demand(), two.demand(), three.demand()) == (0, 0, CAPACITY)
    three.release(held)
    table = two.table("r")
    assert two.allocate(table, 4)
    assert not two.allocate(table, 1)
    with take(one, 12):
        one.leave_line()


def test_cached_blocks_count_as_there(join: Join) -> None:
    one, two = join(0), join(0)
    two.wait_in_line(CAPACITY)
    assert one.demand() == 0
    assert not one.allocate(one.table("r"), 1)
    with take(two, CAPACITY):
        two.leave_line()


def test_a_dead_process_leaves_the_line(join: Join, tmp_path: Path) -> None:
    one, dead = join(0), Region.attach(tmp_path / "r")
    waiting = Pool.create(dead)
    take(one, 8)
    waiting.wait_in_line(12)
    assert one.demand() == 4
    waiting._forget_after_fork()
    dead.close()
    one.reclaim()
    assert one.demand() == 0


def test_who_has_been_silent_for_long_has_no_claim(tmp_path: Path) -> None:
    """A stopped process waits in line or has a floor: the others go on, and it is considered again when it goes on."""
    now = 0
    region = Region.create(tmp_path, "r", BlockGeometry(1, 1, 4, 2, "float32"), CAPACITY, bytes(32), random.Random(0))
    pools = [Pool.create(Region.attach(region.path), clock=lambda: now, floor_blocks=4) for _ in range(2)]
    one, stopped = pools
    stopped.wait_in_line(6)
    now = 1_999_000_000
    first = take(one, 10)
    table = one.table("more")
    assert not one.allocate(table, 1)
    now += 2_000_000
    assert one.allocate(table, 6)
    assert one.demand() == 0
    stopped.catch_up()
    assert one.demand() == 6
    for pool, held in ((one, first), (one, table)):
        pool.release(held)
    for pool in pools:
        pool.close()
        pool.region.close()
    region.close()


def test_the_local_cache_of_an_idle_process_is_given_up(join: Join) -> None:
    idle, waiting = join(0), join(0)
    idle.release(take(idle, 6))
    assert idle.stats().blocks["local"] == 4
    waiting.wait_in_line(CAPACITY)
    assert not waiting.allocate(waiting.table("r"), CAPACITY)
    idle.catch_up()
    with take(waiting, CAPACITY):
        waiting.leave_line()


@pytest.mark.parametrize("wanted", [0, -3, CAPACITY + 1])
def test_nobody_waits_for_what_cannot_come(join: Join, wanted: int) -> None:
    with pytest.raises(ValueError, match=f"nobody can wait for {wanted} of {CAPACITY} blocks"):
        join(0).wait_in_line(wanted)


def test_leaving_a_line_one_is_not_in(join: Join) -> None:
    pool = join(0)
    pool.leave_line()
    pool.wait_in_line(3)
    pool.leave_line()
    pool.leave_line()
    assert join(0).demand() == 0
