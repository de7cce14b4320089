"""Nothing grows with the number of requests."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig

REQUESTS = 100_000
ROOM_BYTES = 1 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_thousand_short_requests_leave_memory_and_index_as_they_were(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=512)
    control = rig.region.control()
    rng = random.Random(3)
    sizes: set[int] = set()
    before = 0
    for number in range(REQUESTS):
        tokens = [rng.randrange(64), rng.randrange(64), rng.randrange(64), number % 997]
        rig.pool.release(rig.run(f"request-{number}", tokens))
        if number % 10_000 == 9_999:
            rig.tick()
            entries = int(np.count_nonzero(control.array("index")))
            blocks = rig.pool.stats().blocks
            assert entries == blocks["cached"]
            sizes.add(entries)
            before = before or resident_bytes()
    assert max(sizes) <= 512
    assert resident_bytes() - before < ROOM_BYTES
    assert rig.pool.stats().evictions["idle"] > REQUESTS // 2
    control.release()
