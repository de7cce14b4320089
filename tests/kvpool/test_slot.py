from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvpool import Pool, PoolError, Region, layout, slot

if TYPE_CHECKING:
    from tests.kvpool.conftest import Rig

SECOND_POOL = """
import sys
import kvpool
try:
    kvpool.Pool.create(kvpool.Region.attach(sys.argv[1]))
except kvpool.PoolError as error:
    print(error)
"""


def test_one_process_mutates_a_region(rig: Rig) -> None:
    with pytest.raises(PoolError, match="another living pool uses"):
        Pool.create(rig.region)
    with Region.attach(rig.region.path) as region, pytest.raises(PoolError, match="another living pool uses"):
        Pool.create(region)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SECOND_POOL, str(rig.region.path)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "another living pool uses" in output.stdout
    assert rig.pool.check_integrity() == ""


def test_the_slot_says_who_and_how_much(rig: Rig) -> None:
    control = rig.region.control()
    words = layout.SLOT_WORDS
    assert control.slots[words["pid"]] == os.getpid()
    assert control.slots[words["start_time"]] > 0
    assert control.slots[words["generation"]] == 1
    table = rig.run("r", [1, 2, 3])
    assert (control.slots[words["held_blocks"]], control.slots[words["open_tables"]]) == (2, 1)
    rig.tick()
    rig.pool.release(table)
    assert (control.slots[words["held_blocks"]], control.slots[words["open_tables"]]) == (0, 0)
    assert control.slots[words["heartbeat"]] == rig.now
    rig.pool.close()
    assert control.slots[words["pid"]] == 0
    with Pool.create(rig.region):
        assert control.slots[words["generation"]] == 2
    control.release()
    rig.region.close()


def test_a_slot_of_the_dead_is_taken_over(rig: Rig) -> None:
    rig.pool.close()
    control = rig.region.control()
    control.slots[64 + layout.SLOT_WORDS["pid"]] = 4242
    assert slot.take(rig.region) == 0
    slot.sign(control, 0, 77)
    assert control.slots[64 + layout.SLOT_WORDS["pid"]] == 0
    assert control.slots[layout.SLOT_WORDS["heartbeat"]] == 77
    rig.region.unlock_slot(0)
    control.release()
    rig.region.close()
