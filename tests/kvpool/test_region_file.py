from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool import BlockGeometry, PoolError, Region, SharedMemoryTooSmall, layout, ofd_lock, region_file

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")


def create(directory: Path, capacity: int = 6) -> Region:
    return Region.create(directory, "r", GEOMETRY, capacity, b"f" * 32, random.Random(1))


def test_t40_larger_than_the_mount_is_refused_with_both_sizes_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=16384, f_frsize=4096))
    with pytest.raises(SharedMemoryTooSmall) as caught:
        create(tmp_path, 1_000_000)
    message = str(caught.value)
    assert "67108864 bytes (64 MiB) free" in message
    needed = layout.plan(GEOMETRY, 1_000_000).file_bytes
    assert f"needs {needed} bytes" in message
    for fix in ("pool.tokens", "KVATLAS_POOL__TOKENS", str(tmp_path), "--shm-size", "sizeLimit"):
        assert fix in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_t40_space_that_vanishes_after_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(fd: int, offset: int, size: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(SharedMemoryTooSmall, match="the pool needs"):
        create(tmp_path)
    assert os.listdir(tmp_path) == []


def test_other_errors_pass_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="broken"):
        create(tmp_path)
    assert os.listdir(tmp_path) == []


def test_every_byte_is_really_there(tmp_path: Path) -> None:
    with create(tmp_path, 2000) as region:
        status = region.path.stat()
        assert status.st_size == region.layout.file_bytes
        assert status.st_blocks * 512 >= status.st_size


class OldKernelMemory(mmap.mmap):
    """A mapping on a kernel without MADV_POPULATE_WRITE."""

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        raise OSError(errno.EINVAL, "unknown advice")


def test_populate_falls_back_to_touching_without_changing() -> None:
    memory = OldKernelMemory(-1, 3 * 4096)
    memory[4096] = 7
    region_file.populate(memory)
    assert memory[4096] == 7
    memory.close()


def test_a_sweep_between_birth_and_lock_costs_only_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ofd_lock.try_lock
    swept: list[str] = []

    def sweep_first(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
        if not swept:
            swept.extend(os.listdir(tmp_path))
            os.unlink(tmp_path / swept[0])
        return real(fd, start, length, shared=shared)

    monkeypatch.setattr(ofd_lock, "try_lock", sweep_first)
    with create(tmp_path):
        assert len(swept) == 1
        assert os.listdir(tmp_path) == ["r"]


def test_of_several_that_create_the_same_region_one_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told before they reserve anything, however full the mount is by then."""
    real = region_file.reserve
    told = []

    def reserve(fd: int, directory: Path, size: int) -> None:
        real(fd, directory, size)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096))
        with pytest.raises(PoolError, match="another process is creating") as caught:
            create(tmp_path)
        told.append(caught.type)
        assert len(os.listdir(tmp_path)) == 1

    monkeypatch.setattr(region_file, "reserve", reserve)
    with create(tmp_path):
        assert told == [PoolError]
        with pytest.raises(PoolError, match="already") as caught:  # not: too small
            create(tmp_path)
        assert caught.type is PoolError


def test_what_a_dead_creator_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "r.creating").write_bytes(b"half")
    with create(tmp_path) as region:
        assert os.listdir(tmp_path) == ["r"]
        assert region.path.stat().st_size == region.layout.file_bytes


def test_a_creator_that_fails_takes_away_only_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in the making is free only when the file is gone, so that it cannot be the next one's."""
    real_unlink, locked = os.unlink, []

    def unlink(path: Path) -> None:
        with open(path, "r+b") as file:
            locked.append(ofd_lock.is_locked(file.fileno(), 0, 0))
        real_unlink(path)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(region_file, "populate", fail)
    with pytest.raises(OSError, match="broken"):
        create(tmp_path)
    assert locked == [True]
    assert os.listdir(tmp_path) == []


def test_the_header_tells_what_the_region_is(tmp_path: Path) -> None:
    with create(tmp_path) as region, open(region.path, "rb") as file:
        header = region_file.check(file.fileno(), region.path)
    assert header == region_file.Header(GEOMETRY, 6, region.incarnation, b"f" * 32, region_file.NO_OWNER)
    assert header.mismatch(None, None, None) == header.mismatch(GEOMETRY, b"f" * 32, bytes(16)) == ""
    assert "another model" in header.mismatch(None, b"g" * 32, None)
    assert "another cluster" in header.mismatch(None, None, b"g" * 16)


def test_only_an_unused_region_is_removed(tmp_path: Path) -> None:
    region = create(tmp_path)
    assert not region_file.remove_unused(region.path)
    region.close()
    assert not region_file.remove_unused(region.path, mtime_ns=1)
    (tmp_path / "note").write_text("not a region")
    assert not region_file.remove_unused(tmp_path / "note")
    assert not region_file.remove_unused(tmp_path / "nothing")
    assert region_file.remove_unused(region.path, mtime_ns=region.path.stat().st_mtime_ns)
    assert os.listdir(tmp_path) == ["note"]
