from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import ofd_lock


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[list[int]]:
    path = tmp_path / "locked"
    path.touch()
    opened = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for _ in range(2)]
    yield opened
    for fd in opened:
        os.close(fd)


def test_one_process_two_descriptions_exclude_each_other(descriptors: list[int]) -> None:
    one, other = descriptors
    assert ofd_lock.try_lock(one, 100, 10)
    assert not ofd_lock.try_lock(other, 105, 1)
    assert ofd_lock.try_lock(other, 110, 10)
    assert ofd_lock.is_locked(other, 0, 0)
    assert not ofd_lock.is_locked(other, 0, 100)
    ofd_lock.unlock(one, 100, 10)
    assert ofd_lock.try_lock(other, 105, 1)


def test_own_lock_does_not_count_as_anothers(descriptors: list[int]) -> None:
    assert ofd_lock.try_lock(descriptors[0], 0, 1)
    assert not ofd_lock.is_locked(descriptors[0], 0, 1)


def test_shared_locks_live_together(descriptors: list[int]) -> None:
    one, other = descriptors
    assert ofd_lock.try_lock(one, 0, 64, shared=True)
    assert ofd_lock.try_lock(other, 0, 64, shared=True)
    assert not ofd_lock.try_lock(other, 0, 0)


def test_other_errors_are_not_contention() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        ofd_lock.try_lock(999_999, 0, 1)
