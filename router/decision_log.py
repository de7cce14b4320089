"""The decision log: what was decided about each request and what came of it, as lines of JSON, for `kvatlas replay --decisions`.

Opt-in (`router.decision_log`). `decision_record.py` says what is in a line, `rotating_file.py` how the files are kept
small. Writing is the business of one thread: whoever routes leaves a record in a queue of bounded length and goes on. A
record that finds the queue full, or that the disk does not take, is dropped and counted; nothing here waits or raises
into its callers.

Limits: what is in the queue when the process is killed is lost, and files are not synced to the disk. A line has some 60
bytes for each candidate and is made under the interpreter's lock.
"""

from __future__ import annotations

import heapq
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kvpool.errors import KvatlasError
from router.decision_record import MalformedRecord, Record, from_line, to_line
from router.rotating_file import RotatingFile, chains, refusal

MAX_BYTES: Final = 64 << 20
KEEP: Final = 4
CAPACITY: Final = 4096
_BATCH: Final = 256
_RETRY_S: Final = 5.0
_CLOSE_S: Final = 5.0
_log = logging.getLogger(__name__)

Entry = Record | Callable[[], Record]
"""A record, or what makes it, which is called in the log's thread."""


class DecisionLogRefused(KvatlasError):
    """`router.decision_log` names a place that no log can be written to."""


def check(path: str) -> None:
    """Raises `DecisionLogRefused` where it is plain that nothing can be written at `path`, the value of `router.decision_log`; an
    empty one is none. Changes nothing.
    """
    problem = refusal(place(path)) if path else ""
    if problem:
        raise DecisionLogRefused(
            f"decisions cannot be logged: {path} {problem}; set router.decision_log to the path of a file that can be written"
        )


def place(path: str) -> Path:
    """Returns where the value of `router.decision_log` points to: ~ is a home directory, unless there is none."""
    return Path(os.path.expanduser(path))


class DecisionLog:
    """Writes at `path` until `close`. Thread-safe. See above."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP, capacity: int = CAPACITY) -> None:
        """`max_bytes` of a file, of which there are at most `keep`; `capacity`: records that wait to be written."""
        self.counts: Counter[str] = Counter()
        """written, dropped (the queue was full), failed (the disk did not take them)."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._queue: queue.Queue[Entry | None] = queue.Queue(capacity)
        self._file: RotatingFile | None = None
        self._problem = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-decision-log", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Leaves `entry` to be written. Never waits; a full queue drops it."""
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.counts["dropped"] += 1

    def report(self) -> dict[str, Any]:
        """Where it writes and what became of the records, ready for JSON."""
        file = self._file
        counts = {name: self.counts[name] for name in ("written", "dropped", "failed")}
        return {"path": str(file.path if file is not None else self._path), **counts, "problem": self._problem}

    def close(self) -> None:
        """Writes what is in the queue, within some seconds, and ends. Idempotent."""
        self._ending.set()
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    # The thread

    def _run(self) -> None:
        self._begin()
        ended = False
        while not ended:
            entries, ended = self._next()
            if entries:
                self._write(entries)
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        """Opens the file before there is anything to write, so that a place that is none is known at once."""
        try:
            self._opened()
        except Exception as error:
            self._fail(error, 0)

    def _opened(self) -> RotatingFile:
        if self._file is None:
            self._file = RotatingFile(self._path, self._max_bytes, self._keep)
        return self._file

    def _next(self) -> tuple[list[Entry], bool]:
        """Waits for an entry; returns it with those behind it, and whether the end is among them."""
        entries: list[Entry] = []
        entry = self._queue.get()
        while entry is not None and len(entries) < _BATCH:
            entries.append(entry)
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                return entries, False
        if entry is not None:
            entries.append(entry)
        return entries, entry is None

    def _write(self, entries: list[Entry]) -> None:
        try:
            lines = b"".join(to_line(entry() if callable(entry) else entry) for entry in entries)
            self._opened().write(lines)
        except Exception as error:
            self._fail(error, len(entries))
            return
        self.counts["written"] += len(entries)
        self._problem = ""

    def _fail(self, error: Exception, count: int) -> None:
        self.counts["failed"] += count
        problem = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        if not self._problem:
            _log.warning("decisions cannot be logged at %s (%s): check router.decision_log", self._path, problem)
        self._problem = problem
        if self._file is not None:
            self._file.close()
            self._file = None
        self._ending.wait(_RETRY_S)  # the queue fills meanwhile, and then drops


class Reading:
    """The records of a log, in the order of their times: iterate once. `malformed` counts the lines passed over."""

    def __init__(self, path: Path) -> None:
        """`path` is the one of `router.decision_log`: files moved aside and those of other processes are read as well."""
        self.files = chains(path)
        self.malformed = 0

    def __iter__(self) -> Iterator[Record]:
        return heapq.merge(*(self._records(chain) for chain in self.files), key=lambda record: record.time_s)

    def _records(self, chain: list[Path]) -> Iterator[Record]:
        for file in chain:
            with file.open("rb") as source:
                for line in source:
                    try:
                        yield from_line(line)
                    except MalformedRecord:  # the last line of a process that was killed, or no log at all
                        self.malformed += 1
