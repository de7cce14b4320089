"""A file of lines that is appended to, kept below a size by moving what is full aside, and written by one process only.

    NAME.jsonl, NAME.jsonl.1, ..., NAME.jsonl.(keep - 1)        newest first; what would be older is deleted

Another process on the same machine that is told the same path takes the next name, NAME-1.jsonl, and so on: a lock on
NAME.jsonl.lock says who has which. So the disk that a path may take is keep x max_bytes for each process that writes at the same
time, however often they are restarted.

A file that somebody else deletes, moves away or cuts is noticed at the next `write`, which goes to a new one where it was. A
line that was torn, because a process was killed or the disk full, is ended before the next one begins.

Limits: one `write` is never split, so a file may exceed `max_bytes` by one of them. The lock holds within a machine; a path on a
disk that several machines share needs a name for each.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import Final

MAX_WRITERS: Final = 64


class RotatingFile:
    """See above. Not thread-safe. Construction raises OSError when the place cannot be written to."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        """`keep`: files that there are at most, the one being written included; at least 1."""
        self._asked = path
        self._max_bytes = max_bytes
        self._keep = keep
        self.path, self._lock, self._file = _taken(path)
        """Where this process writes."""

    def write(self, data: bytes) -> None:
        """Appends `data`, whole lines, in a new file when this one would be too long. Raises OSError; what was written by then
        stays.
        """
        size = self._size()
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            data = b"\n" + data
        if size and size + len(data) > self._max_bytes:
            self._rotate()
            data = data.removeprefix(b"\n")
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        """Gives the name free. The file stays."""
        os.close(self._file)
        os.close(self._lock)

    def _size(self) -> int:
        """Bytes in the file that the path names, which is opened anew if it is another one by now, or none."""
        mine = os.fstat(self._file)
        if _is_at(self.path, mine):
            return mine.st_size
        if _is_at(_lock_of(self.path), os.fstat(self._lock)):
            fresh = _opened(self.path)
            os.close(self._file)
            self._file = fresh
        else:  # the whole directory went
            path, lock, file = _taken(self._asked)
            self.close()
            self.path, self._lock, self._file = path, lock, file
        return os.fstat(self._file).st_size

    def _rotate(self) -> None:
        if self._keep == 1:
            os.ftruncate(self._file, 0)
            return
        for number in range(self._keep - 1, 1, -1):
            younger = _aside(self.path, number - 1)
            if younger.exists():
                younger.replace(_aside(self.path, number))
        self.path.replace(_aside(self.path, 1))
        fresh = _opened(self.path)
        os.close(self._file)
        self._file = fresh


def chains(path: Path) -> list[list[Path]]:
    """The files that writers at `path` left, oldest first: one list for each name that a process took."""
    name = re.compile(rf"{re.escape(path.stem)}(?:-(\d+))?{re.escape(path.suffix)}(?:\.(\d+))?")
    found: dict[int, dict[int, Path]] = {}
    for file in path.parent.iterdir() if path.parent.is_dir() else ():
        match = name.fullmatch(file.name)
        if match and file.is_file():
            found.setdefault(int(match[1] or 0), {})[int(match[2] or 0)] = file
    return [[files[number] for number in sorted(files, reverse=True)] for _, files in sorted(found.items())]


def refusal(path: Path) -> str:
    """Returns why nothing can be written at `path`, in words that follow it; empty where nothing speaks against it.

    Creates nothing, so a full disk, for one, is not found.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):
                return "is a directory" if stat.S_ISDIR(mode) else "is no regular file"
            if not os.access(path, os.R_OK | os.W_OK):
                return "may not be written to"
        above = path.parent
        while not above.exists():
            above = above.parent
    except (OSError, ValueError) as error:  # too long a name, a null in it, a directory that may not be looked into
        return f"is no path of a file ({getattr(error, 'strerror', None) or error})"
    if not above.is_dir():
        return f"cannot be made: {above} is no directory"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"cannot be made: {above} may not be written to"
    return ""


def _taken(path: Path) -> tuple[Path, int, int]:
    """The first name that no living process has, the descriptor that holds its lock, and that of its file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise _no_file()  # before a lock is left beside it
    name, lock = _claimed(path)
    try:
        return name, lock, _opened(name)
    except BaseException:
        os.close(lock)
        raise


def _claimed(path: Path) -> tuple[Path, int]:
    """The first name that no living process has, and the descriptor that holds its lock."""
    for number in range(MAX_WRITERS):
        name = path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
        lock = os.open(_lock_of(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        except BaseException:
            os.close(lock)
            raise
        else:
            return name, lock
    raise OSError(f"{MAX_WRITERS} processes write at {path} already")


def _opened(path: Path) -> int:
    """A descriptor of the file at `path`, made if there is none. Never waits, as opening a pipe might."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _no_file()
    return file


def _no_file() -> OSError:
    return OSError(errno.EINVAL, "it is no regular file")


def _is_at(path: Path, mine: os.stat_result) -> bool:
    """Whether `path` names this file."""
    try:
        there = os.stat(path)
    except OSError:
        return False
    return os.path.samestat(there, mine)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
