"""Files that stay small, one name for each process."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from router import rotating_file
from router.rotating_file import RotatingFile, chains


class Files:
    """Rotating files that are closed in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[RotatingFile] = []

    def open(self, max_bytes: int = 10, keep: int = 3) -> RotatingFile:
        self.opened.append(RotatingFile(self.path, max_bytes, keep))
        return self.opened[-1]

    def close(self, file: RotatingFile) -> None:
        self.opened.remove(file)
        file.close()

    def contents(self) -> dict[str, bytes]:
        found = {file.name: file.read_bytes() for file in self.path.parent.iterdir()}
        return {name: data for name, data in found.items() if not name.endswith(".lock")}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path / "new" / "log.jsonl")
    yield made
    for file in list(made.opened):
        made.close(file)


def test_moves_full_files_aside_and_deletes_the_oldest(files: Files) -> None:
    file = files.open(max_bytes=10, keep=3)
    for number in range(8):
        file.write(b"%d....\n" % number)  # six bytes: one fits, two do not
    assert files.contents() == {
        "log.jsonl": b"7....\n",
        "log.jsonl.1": b"6....\n",
        "log.jsonl.2": b"5....\n",
    }


def test_the_disk_taken_is_bounded_whatever_is_written(files: Files) -> None:
    for _ in range(4):  # restarts go on where the last process ended
        file = files.open(max_bytes=50, keep=2)
        for size in (1, 30, 49, 3, 50, 7):
            file.write(b"x" * size)
            assert all(len(data) <= 50 for data in files.contents().values())
            assert len(files.contents()) <= 2
        files.close(file)


def test_a_write_is_never_split(files: Files) -> None:
    file = files.open(max_bytes=10)
    file.write(b"a\n")
    file.write(b"b" * 40)
    file.write(b"c\n")
    assert files.contents() == {"log.jsonl.2": b"a\n", "log.jsonl.1": b"b" * 40, "log.jsonl": b"c\n"}


def test_one_file_alone_begins_anew(files: Files) -> None:
    file = files.open(max_bytes=4, keep=1)
    file.write(b"abc")
    file.write(b"de")
    assert files.contents() == {"log.jsonl": b"de"}


def test_each_process_has_a_name_of_its_own_and_gives_it_back(files: Files) -> None:
    first, second = files.open(), files.open()
    assert [first.path.name, second.path.name] == ["log.jsonl", "log-1.jsonl"]
    files.close(first)
    assert files.open().path.name == "log.jsonl"
    assert files.open().path.name == "log-2.jsonl"


def test_too_many_writers_are_refused_and_leave_nothing_open(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotating_file, "MAX_WRITERS", 2)
    files.open(), files.open()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="2 processes"):
        files.open()
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_the_owner_may_read(files: Files) -> None:
    file = files.open(max_bytes=1)
    file.write(b"a")
    file.write(b"b")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in file.path.parent.iterdir()}
    assert modes == {0o600}


def test_chains_are_the_files_of_each_name_oldest_first(files: Files) -> None:
    first, second = files.open(max_bytes=1), files.open(max_bytes=1)
    for file in (first, second):
        for data in (b"a", b"b", b"c"):
            file.write(data)
    for stranger in ("log.jsonl.x", "log-a.jsonl", "mylog.jsonl", "log.jsonl.1.gz"):
        (files.path.parent / stranger).touch()
    found = [[file.name for file in chain] for chain in chains(files.path)]
    assert found == [
        ["log.jsonl.2", "log.jsonl.1", "log.jsonl"],
        ["log-1.jsonl.2", "log-1.jsonl.1", "log-1.jsonl"],
    ]
    assert [b"".join(file.read_bytes() for file in chain) for chain in chains(files.path)] == [b"abc", b"abc"]


def test_no_file_no_chain(tmp_path: Path) -> None:
    assert chains(tmp_path / "log.jsonl") == []
    assert chains(tmp_path / "nowhere" / "log.jsonl") == []
