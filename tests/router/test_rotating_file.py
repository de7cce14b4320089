"""Files that stay small, one name for each process."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router import rotating_file
from router.rotating_file import RotatingFile, chains, refusal


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


def _cut(path: Path) -> None:
    os.truncate(path, 0)


def _replaced(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"new\n")


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (Path.unlink, b"b\n"),
        (lambda path: path.rename(path.with_name("old")), b"b\n"),
        (lambda path: shutil.rmtree(path.parent), b"b\n"),
        (lambda path: path.parent.rename(path.parent.with_name("old")), b"b\n"),
        (_replaced, b"new\nb\n"),
        (_cut, b"b\n"),
    ],
)
def test_a_file_that_somebody_takes_away_is_there_again_at_the_next_write(
    files: Files, harm: Callable[[Path], None], found: bytes
) -> None:
    file = files.open(max_bytes=8, keep=2)
    before = len(os.listdir("/proc/self/fd"))
    file.write(b"a\n")
    harm(files.path)
    file.write(b"b\n")
    assert file.path == files.path
    assert files.path.read_bytes() == found
    for _ in range(4):  # and goes on to be moved aside
        file.write(b"c....\n")
    assert files.contents().keys() >= {"log.jsonl", "log.jsonl.1"}
    assert len(os.listdir("/proc/self/fd")) == before
    second = files.open()
    assert second.path.name == "log-1.jsonl", "the name is still taken"


def test_a_place_that_is_gone_and_taken_by_another_process(files: Files) -> None:
    first = files.open()
    first.write(b"a\n")
    shutil.rmtree(files.path.parent)
    second = files.open()
    assert second.path == files.path
    first.write(b"b\n")
    second.write(b"c\n")
    assert files.contents() == {"log.jsonl": b"c\n", "log-1.jsonl": b"b\n"}


@pytest.mark.parametrize("torn", [b"half", b"whole\nhalf", b"\n\x00"])
@pytest.mark.parametrize("while_open", [False, True])
def test_a_torn_line_is_ended_before_the_next_one(files: Files, torn: bytes, while_open: bool) -> None:
    files.path.parent.mkdir()
    if while_open:
        file = files.open(max_bytes=100)
        file.write(torn)  # a disk that took a part of it
    else:
        files.path.write_bytes(torn)
        file = files.open(max_bytes=100)
    file.write(b"next\n")
    file.write(b"last\n")
    assert files.contents() == {"log.jsonl": torn + b"\nnext\nlast\n"}


def test_a_torn_line_that_is_moved_aside_leaves_nothing_in_the_new_file(files: Files) -> None:
    file = files.open(max_bytes=10)
    file.write(b"half")
    file.write(b"123456\n")
    assert files.contents() == {"log.jsonl.1": b"half", "log.jsonl": b"123456\n"}


def _directory(path: Path) -> None:
    path.mkdir(parents=True)


def _pipe(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [_directory, _pipe, _device])
def test_what_is_no_file_is_refused_without_waiting_or_leaving_anything(
    files: Files, make: Callable[[Path], None]
) -> None:
    make(files.path)
    before = sorted(os.listdir(files.path.parent)), len(os.listdir("/proc/self/fd"))
    assert refusal(files.path)
    with pytest.raises(OSError, match="regular file"):
        files.open()
    assert (sorted(os.listdir(files.path.parent)), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("", "is a directory"),
        ("file/log.jsonl", "file is no directory"),
        ("file/new/log.jsonl", "file is no directory"),
        ("x" * 300, "no path of a file"),
        ("a\0b", "no path of a file"),
        ("new/log.jsonl", ""),
        ("file", ""),
    ],
)
def test_a_place_that_is_none_is_known_beforehand(tmp_path: Path, path: str, word: str) -> None:
    (tmp_path / "file").touch()
    told = refusal(tmp_path / path)
    assert word in told
    assert bool(told) == bool(word)
    assert os.listdir(tmp_path) == ["file"]


def test_rights_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs the tests may have all of them
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == "may not be written to"
    assert refusal(tmp_path / "new" / "log") == f"cannot be made: {tmp_path} may not be written to"
