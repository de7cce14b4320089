"""A file that is appended to, kept below a size by moving what is full aside, and written by one process only.

    NAME.jsonl, NAME.jsonl.1, ..., NAME.jsonl.(keep - 1)        newest first; what would be older is deleted

Another process on the same machine that is told the same path takes the next name, NAME-1.jsonl, and so on: a lock on
NAME.jsonl.lock says who has which. So the disk that a path may take is keep x max_bytes for each process that writes at the same
time, however often they are restarted.

Limits: one `write` is never split, so a file may exceed `max_bytes` by one of them. The lock holds within a machine; a path on a
disk that several machines share needs a name for each.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

MAX_WRITERS: Final = 64


class RotatingFile:
    """See above. Not thread-safe. Construction raises OSError when the place cannot be written to."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        """`keep`: files that there are at most, the one being written included; at least 1."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._keep = keep
        self.path, self._lock = _claimed(path)
        """Where this process writes."""
        try:
            self._file = _opened(self.path)
        except OSError:
            os.close(self._lock)
            raise
        self._size = os.fstat(self._file).st_size

    def write(self, data: bytes) -> None:
        """Appends `data`, in a new file when this one would be too long. Raises OSError; what was written by then stays."""
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        left = memoryview(data)
        while left:
            count = os.write(self._file, left)
            self._size += count
            left = left[count:]

    def close(self) -> None:
        """Gives the name free. The file stays."""
        os.close(self._file)
        os.close(self._lock)

    def _rotate(self) -> None:
        if self._keep == 1:
            os.ftruncate(self._file, 0)
            self._size = 0
            return
        for number in range(self._keep - 1, 1, -1):
            younger = _aside(self.path, number - 1)
            if younger.exists():
                younger.replace(_aside(self.path, number))
        self.path.replace(_aside(self.path, 1))
        fresh = _opened(self.path)
        os.close(self._file)
        self._file, self._size = fresh, 0


def chains(path: Path) -> list[list[Path]]:
    """The files that writers at `path` left, oldest first: one list for each name that a process took."""
    name = re.compile(rf"{re.escape(path.stem)}(?:-(\d+))?{re.escape(path.suffix)}(?:\.(\d+))?")
    found: dict[int, dict[int, Path]] = {}
    for file in path.parent.iterdir() if path.parent.is_dir() else ():
        match = name.fullmatch(file.name)
        if match and file.is_file():
            found.setdefault(int(match[1] or 0), {})[int(match[2] or 0)] = file
    return [[files[number] for number in sorted(files, reverse=True)] for _, files in sorted(found.items())]


def _claimed(path: Path) -> tuple[Path, int]:
    """The first name that no living process has, and the descriptor that holds its lock."""
    for number in range(MAX_WRITERS):
        name = path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
        lock = os.open(name.with_name(name.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
