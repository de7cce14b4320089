"""How long a region of the usual size takes to make, and to join: the demo model's blocks, about 1.5 GB.

Making it includes touching every page, so that serving never waits for one. Joining is what a second replica of the node
does: map it with its pages, take a slot.

Limits: needs the room; `room_for` says when there is none, and nothing is tried then.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any, Final

from kvpool import BlockGeometry, Pool, Region, layout

GEOMETRY: Final = BlockGeometry(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
_SPARE: Final = 1.1
"""Room for others beside the region."""


def room_for(directory: Path, blocks: int, meminfo: Path = Path("/proc/meminfo")) -> str:
    """Returns '' when `directory` and the machine's memory have room for the region, else why not, in a sentence."""
    needed = int(layout.plan(GEOMETRY, blocks).file_bytes * _SPARE)
    status = os.statvfs(directory)
    free = {str(directory): status.f_bavail * status.f_frsize, "this machine's memory": _available(meminfo)}
    for where, size in free.items():
        if size is not None and size < needed:
            return f"{where} has {size / 2**20:.0f} MiB free, this part needs {needed / 2**20:.0f} MiB"
    return ""


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def create(directory: Path, name: str, blocks: int) -> dict[str, Any]:
    """Makes the region `directory`/`name` and leaves it there; returns seconds and sizes. Raises PoolError."""
    begin = time.perf_counter()
    region = Region.create(directory, name, GEOMETRY, blocks, bytes(layout.FINGERPRINT_BYTES), random.SystemRandom())
    seconds = time.perf_counter() - begin
    plan = region.layout
    region.close()
    kv_bytes = GEOMETRY.block_bytes * blocks
    return {"create_s": seconds, "bytes": plan.file_bytes, "control_share": plan.control_bytes / kv_bytes}


def attach(path: Path) -> dict[str, Any]:
    """Joins the region at `path` with a pool, and leaves it; returns the seconds of joining. Raises PoolError."""
    begin = time.perf_counter()
    region = Region.attach(path, geometry=GEOMETRY, populate=True)
    pool = Pool.create(region)
    seconds = time.perf_counter() - begin
    pool.close()
    region.close()
    return {"attach_s": seconds}
