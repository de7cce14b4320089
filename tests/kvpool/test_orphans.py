from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool import BlockGeometry, PoolError, Region, ofd_lock, sweep

GEOMETRY = BlockGeometry(1, 1, 4, 2, "float32")

CHILD = """
import os, random, sys, time
import kvpool
geometry = kvpool.BlockGeometry(1, 1, 4, 2, "float32")
region = kvpool.Region.create(sys.argv[1], sys.argv[2], geometry, 8, bytes(32), random.Random(0))
pool = kvpool.Pool.create(region)
table = pool.table("doomed")
pool.allocate(table, 3)
if len(sys.argv) > 3:
    grandchild = os.fork()
    if grandchild == 0:
        time.sleep(60)
        os._exit(0)
    print(grandchild, flush=True)
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def living_owner(directory: Path, name: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), name, *more], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def swept_within(seconds: float, directory: Path) -> list[Path]:
    """Sweeps until something goes: a forked child gives the lock back when it first runs, not at the fork itself."""
    deadline = time.monotonic() + seconds
    while not (removed := sweep(directory, "kv-")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return removed


def create(directory: Path, name: str) -> Region:
    return Region.create(directory, name, GEOMETRY, 4, bytes(32), random.Random(0))


def test_t37_a_killed_owners_region_is_swept_a_living_ones_is_not(tmp_path: Path) -> None:
    with living_owner(tmp_path, "kv-1") as child:
        assert line(child) == "ready"
        assert sweep(tmp_path, "kv-") == []
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert (tmp_path / "kv-1").exists()
        with pytest.raises(PoolError, match="already"):
            create(tmp_path, "kv-1")
        assert sweep(tmp_path, "kv-") == [tmp_path / "kv-1"]
    with create(tmp_path, "kv-1"):
        assert sweep(tmp_path, "kv-") == []


def test_a_forked_child_that_outlives_the_owner_keeps_nothing_alive(tmp_path: Path) -> None:
    with living_owner(tmp_path, "kv-1", "fork") as child:
        grandchild = int(line(child))
        assert line(child) == "ready"
        try:
            child.kill()
            child.wait()
            assert swept_within(5.0, tmp_path) == [tmp_path / "kv-1"]
            os.kill(grandchild, 0)  # it was alive all the time
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_an_attacher_keeps_the_region_when_its_creator_has_gone(tmp_path: Path) -> None:
    creator = create(tmp_path, "kv-1")
    with Region.attach(creator.path):
        creator.close()
        assert sweep(tmp_path, "kv-") == []
    assert sweep(tmp_path, "kv-") == [tmp_path / "kv-1"]


def test_two_lives_with_one_process_id(tmp_path: Path) -> None:
    """The second life of a process id neither keeps nor loses what the first one left."""
    create(tmp_path, "kv-first").close()
    with create(tmp_path, "kv-second"):
        assert sweep(tmp_path, "kv-") == [tmp_path / "kv-first"]


def test_only_regions_with_the_prefix_are_candidates(tmp_path: Path) -> None:
    create(tmp_path, "other-1").close()
    (tmp_path / "kv-notes.txt").write_text("not a region")
    (tmp_path / "kv-directory").mkdir()
    (tmp_path / "kv-link").symlink_to(tmp_path / "other-1")
    os.mkfifo(tmp_path / "kv-fifo")
    assert sweep(tmp_path, "kv-") == []
    with pytest.raises(ValueError, match="non-empty"):
        sweep(tmp_path, "")


def test_a_half_made_region_goes_too(tmp_path: Path) -> None:
    half = tmp_path / "kv-1.creating-0123"
    half.touch()
    assert sweep(tmp_path, "kv-") == [half]


def test_an_attacher_that_comes_during_a_sweep_is_told(tmp_path: Path) -> None:
    create(tmp_path, "kv-1").close()
    fd = os.open(tmp_path / "kv-1", os.O_RDWR | os.O_CLOEXEC)
    assert ofd_lock.try_lock(fd, 0, 0)
    with pytest.raises(PoolError, match="is being removed"):
        Region.attach(tmp_path / "kv-1")
    os.close(fd)
    Region.attach(tmp_path / "kv-1").close()
