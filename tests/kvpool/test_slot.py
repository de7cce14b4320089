from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvpool import Pool, PoolError, Region, SlotLoad, layout, slot

if TYPE_CHECKING:
    from tests.kvpool.conftest import Rig

SECOND_PROCESS = """
import os, signal, sys
import kvpool
pool = kvpool.Pool.create(kvpool.Region.attach(sys.argv[1]))
print(pool.slot)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_second_process(rig: Rig) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-uc", SECOND_PROCESS, str(rig.region.path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()


def test_each_process_has_a_slot_of_its_own(rig: Rig) -> None:
    assert rig.pool.slot == 0
    with Region.attach(rig.region.path) as region, Pool.create(region) as pool:
        assert pool.slot == 1
        assert run_second_process(rig) == "2"
        assert rig.pool.check_integrity() == pool.check_integrity() == ""


def test_a_dead_process_slot_is_used_again_after_reclaiming(rig: Rig) -> None:
    assert run_second_process(rig) == "1"
    control = rig.region.control()
    assert slot.word(control, 1, "pid") != 0
    (reclaimed,) = rig.pool.reclaim()
    assert (reclaimed.slot, reclaimed.count) == (1, 0)
    assert slot.word(control, 1, "pid") == 0
    assert run_second_process(rig) == "1"
    assert slot.word(control, 1, "generation") == 2
    control.release()


def test_the_slot_says_who_and_how_much(rig: Rig) -> None:
    control = rig.region.control()
    assert slot.word(control, 0, "pid") == os.getpid()
    assert slot.word(control, 0, "start_time") > 0
    assert slot.word(control, 0, "generation") == 1
    table = rig.run("r", [1, 2, 3])
    assert slot.word(control, 0, "used_blocks") == 2
    rig.pool.release(table)
    assert slot.word(control, 0, "used_blocks") == 0
    rig.tick()
    rig.pool.report_load(SlotLoad("replica#\u00e9", 7, 2, 1, 123.4567))
    assert slot.word(control, 0, "heartbeat") == rig.now
    assert slot.load_of(control, 0) == SlotLoad("replica#\u00e9", 7, 2, 1, 123.456)
    assert rig.pool.loads() == [SlotLoad("replica#\u00e9", 7, 2, 1, 123.456)]
    rig.pool.close()
    assert slot.word(control, 0, "pid") == 0
    with Pool.create(rig.region) as pool:
        assert slot.word(control, 0, "generation") == 2
        assert pool.loads() == []
    control.release()
    rig.region.close()


def test_what_a_slot_counted_is_kept_when_it_is_given_back(rig: Rig) -> None:
    control = rig.region.control()
    with Region.attach(rig.region.path) as region, Pool.create(region) as pool, pool.table("r") as table:
        pool.allocate(table, 3)
    retired = layout.RETIRED * layout.SLOT_WORD_COUNT
    assert control.slots[retired + layout.COUNTERS["requested_blocks"]] == 3
    assert control.slots[retired + layout.COUNTERS["peak_requested_blocks"]] == 3
    first = layout.SLOT_WORD_COUNT
    assert control.slots[first + layout.COUNTERS["requested_blocks"]] == 0
    control.release()


def test_sixty_four_slots_and_no_more(rig: Rig) -> None:
    regions = [Region.attach(rig.region.path) for _ in range(layout.SLOTS - 1)]
    pools = [Pool.create(region) for region in regions]
    with Region.attach(rig.region.path) as region:
        with pytest.raises(PoolError, match=r"64 processes use .* already; give this one a region of its own"):
            Pool.create(region)
        pools[10].close()
        with Pool.create(region) as pool:
            assert pool.slot == 11
    for pool, region in zip(pools, regions, strict=True):
        pool.close()
        region.close()


@pytest.mark.parametrize("floor", [-1, 9])
def test_a_floor_fits_the_pool(rig: Rig, floor: int) -> None:
    with Region.attach(rig.region.path) as region, pytest.raises(ValueError, match="between 0 and the capacity of 8"):
        Pool.create(region, floor_blocks=floor)


def test_a_forked_child_takes_a_slot_of_its_own(rig: Rig) -> None:
    table = rig.run("parent", [1, 2, 3, 4])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            assert table.close() == 0  # the parent's, not ours to give back
            with rig.pool.rejoin() as pool, pool.table("child") as mine:
                matched = pool.match(mine, rig.keys([1, 2, 3, 4]))
                os.write(write, f"{pool.slot} {matched} {pool.check_integrity()}".encode())
                pool.close()
                pool.region.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"1 2 "
    os.close(read)
    os.close(write)
    assert len(table) == 2
    rig.pool.release(table)
    assert rig.pool.reclaim() == []
