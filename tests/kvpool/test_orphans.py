from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool import BlockGeometry, PoolError, Region, RegionMismatch, ofd_lock, orphans, region_file, sweep

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


OWNER = b"o" * 16


def create(directory: Path, name: str, blocks: int = 4, owner: bytes = OWNER) -> Region:
    return Region.create(directory, name, GEOMETRY, blocks, bytes(32), random.Random(0), owner)


def orphan(directory: Path, name: str, last_use_s: float, blocks: int = 4, owner: bytes = OWNER) -> Path:
    """An orphan that was last used at that Unix time."""
    create(directory, name, blocks, owner).close()
    os.utime(directory / name, (last_use_s, last_use_s))
    return directory / name


def adopt(directory: Path, capacity_blocks: int | None = None, geometry: BlockGeometry = GEOMETRY) -> Region | None:
    return orphans.adopt(
        directory, "kv-", geometry=geometry, fingerprint=bytes(32), owner=OWNER, capacity_blocks=capacity_blocks
    )


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
    half = tmp_path / "kv-1.creating"
    for options in ({}, {"older_than_s": 1e9}, {"owner": OWNER}):
        half.touch()
        assert sweep(tmp_path, "kv-", **options) == [half]


def test_an_attacher_that_comes_during_a_sweep_is_told(tmp_path: Path) -> None:
    create(tmp_path, "kv-1").close()
    fd = os.open(tmp_path / "kv-1", os.O_RDWR | os.O_CLOEXEC)
    assert ofd_lock.try_lock(fd, 0, 0)
    with pytest.raises(PoolError, match="being removed or adopted"):
        Region.attach(tmp_path / "kv-1")
    os.close(fd)
    Region.attach(tmp_path / "kv-1").close()


def test_candidates_are_what_nobody_has_open_the_last_used_first(tmp_path: Path) -> None:
    old, young = orphan(tmp_path, "kv-b", 100.0), orphan(tmp_path, "kv-a", 200.0, 6)
    half = tmp_path / "kv-c.creating"
    half.touch()
    os.utime(half, (150, 150))
    orphan(tmp_path, "other-1", 300.0)
    with create(tmp_path, "kv-alive"):
        found = orphans.candidates(tmp_path, "kv-")
        assert [one.path for one in found] == [young, half, old]
        assert [one.half_made for one in found] == [False, True, False]
        assert [one.mtime_ns for one in found] == [200 * 10**9, 150 * 10**9, 100 * 10**9]
        assert [one.header and one.header.capacity_blocks for one in found] == [6, None, 4]
        assert found[0].held_bytes >= young.stat().st_size
        Region.attach(tmp_path / "kv-alive").close()  # looking at it took nothing
    with pytest.raises(ValueError, match="non-empty"):
        orphans.candidates(tmp_path, "")


def test_adoption_prefers_the_last_used_that_fits(tmp_path: Path) -> None:
    orphan(tmp_path, "kv-old", 100.0)
    orphan(tmp_path, "kv-larger", 200.0, 6)
    orphan(tmp_path, "kv-foreign", 300.0, owner=bytes(16))
    orphan(tmp_path, "other-1", 400.0)
    (tmp_path / "kv-half.creating").touch()
    with create(tmp_path, "kv-alive"):
        taken = []
        for capacity in (4, None, None, 4):
            taken.append(adopt(tmp_path, capacity))
        assert [region and region.path.name for region in taken] == ["kv-old", "kv-larger", None, None]
        for region in taken:
            if region is not None:
                region.close()
    assert {path.name for path in tmp_path.iterdir()} == {
        "kv-old", "kv-larger", "kv-foreign", "other-1", "kv-half.creating", "kv-alive",
    }  # fmt: skip


def test_nothing_of_another_shape_is_adopted(tmp_path: Path) -> None:
    path = orphan(tmp_path, "kv-1", 100.0)
    assert adopt(tmp_path, geometry=BlockGeometry(1, 1, 4, 4, "float32")) is None
    assert adopt(tmp_path, 5) is None
    os.truncate(path, 10_000)
    assert adopt(tmp_path) is None
    assert sweep(tmp_path, "kv-") == [path]


def test_what_other_weights_computed_is_never_adopted(tmp_path: Path) -> None:
    path = orphan(tmp_path, "kv-1", 100.0)
    assert (
        orphans.adopt(tmp_path, "kv-", geometry=GEOMETRY, fingerprint=b"g" * 32, owner=OWNER, capacity_blocks=None)
        is None
    )
    with pytest.raises(RegionMismatch, match="another model"):
        Region.adopt(path, geometry=GEOMETRY, fingerprint=b"g" * 32, owner=OWNER)
    region = adopt(tmp_path)
    assert region is not None
    region.close()


def test_of_many_adopters_each_gets_another_one(tmp_path: Path) -> None:
    for number in range(3):
        orphan(tmp_path, f"kv-{number}", 100.0 + number)
    regions: list[Region | None] = []
    threads = [threading.Thread(target=lambda: regions.append(adopt(tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [region for region in regions if region is not None]
    assert len({region.path for region in found}) == len(found) == 3
    for region in found:
        region.close()


def test_a_sweep_by_age_takes_the_old_ones(tmp_path: Path) -> None:
    old = orphan(tmp_path, "kv-old", 100.0)
    orphan(tmp_path, "kv-young", 1000.0)
    orphan(tmp_path, "kv-tomorrow", 9999.0)  # a clock was set back: as young as can be
    assert sweep(tmp_path, "kv-", older_than_s=600.0, now=lambda: 1000.0) == [old]
    assert sweep(tmp_path, "kv-", older_than_s=0.5, now=lambda: 1000.0) == []
    assert len(sweep(tmp_path, "kv-", now=lambda: 1000.0)) == 2


def test_a_sweep_of_one_owner_leaves_the_others(tmp_path: Path) -> None:
    mine = orphan(tmp_path, "kv-mine", 100.0)
    orphan(tmp_path, "kv-foreign", 100.0, owner=bytes(16))
    damaged = orphan(tmp_path, "kv-damaged", 100.0)
    os.truncate(damaged, 10_000)
    assert sweep(tmp_path, "kv-", owner=OWNER) == [mine]


def test_what_was_used_since_it_was_looked_at_stays(tmp_path: Path) -> None:
    path = orphan(tmp_path, "kv-1", 100.0)
    (seen,) = orphans.candidates(tmp_path, "kv-")
    Region.attach(path).close()  # a life, and the death after it
    assert not orphans.remove(seen)
    (seen,) = orphans.candidates(tmp_path, "kv-")
    with Region.attach(path):
        assert not orphans.remove(seen)
    (seen,) = orphans.candidates(tmp_path, "kv-")
    assert orphans.remove(seen)


class Mount:
    """A mount of `size` bytes, filled by the files that are there."""

    def __init__(self, directory: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.size = directory, size
        monkeypatch.setattr(region_file, "free_bytes", lambda _: self.free())

    def free(self) -> int:
        return self.size - sum(path.stat().st_blocks * 512 for path in self.directory.iterdir())


def test_room_is_made_by_the_oldest_first_and_no_more_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [orphan(tmp_path, f"kv-{number}", 100.0 + number, owner=bytes([number] * 16)) for number in (3, 1, 2)]
    each = paths[0].stat().st_blocks * 512
    with create(tmp_path, "kv-alive"):
        mount = Mount(tmp_path, 10 * each, monkeypatch)
        free = mount.free()
        assert orphans.make_room(tmp_path, "kv-", free) == []
        assert orphans.make_room(tmp_path, "kv-", free + 3 * each + 1) == [], "not enough, so nothing is lost"
        assert orphans.make_room(tmp_path, "kv-", free + each + 1) == [tmp_path / "kv-1", tmp_path / "kv-2"]
        assert mount.free() >= free + each + 1
        assert orphans.make_room(tmp_path, "kv-", free + 3 * each) == [tmp_path / "kv-3"]
        assert (tmp_path / "kv-alive").exists()
