from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool import BlockGeometry, Region, SharedMemoryTooSmall, layout, ofd_lock, region_file

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
