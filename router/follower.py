"""Keeps a mirror in step with a directory: snapshots first, then the log, in a thread of its own.

Look. Take the log's tip, read the snapshot of each pool that the mirror does not have by the same writer, and go on reading
from the lowest position a snapshot was taken at; what the mirror has already, it passes over. Pools that the directory
does not list are left to their lease: a directory that came back empty says nothing about them.

Follow. Read what comes next, waiting for it; apply it. When the mirror wants the snapshot of a single pool (a missing
batch, a wrong digest, a new writer), read it and go back in the log to the position it was taken at. When the log no longer
has what comes next, or is another log, look again.

When the directory does not answer, the mirror stays as it is and grows old (`Mirror.lag_s`, leases); the follower tries
again with growing pauses, and then looks.

Limits: a thread sees changes as soon as the directory answers its blocking read. `close()` takes up to one read
(`read_s`), or a time-out of the backend.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvpool.directory.backend import Cursor, DirectoryReader, Tip
from kvpool.directory.errors import DirectoryUnavailable, LogGap, MalformedEntry
from router.mirror import Mirror

_log = logging.getLogger(__name__)
FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 2.0


class Follower:
    """Writes `mirror` from `reader`, one `step` at a time. Not thread-safe; `connected` and `counts` may be read."""

    def __init__(self, reader: DirectoryReader, mirror: Mirror, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self.connected = False
        self.problem = ""
        """Why it is not connected, in words; no password in it."""
        self.counts: Counter[str] = Counter()
        """looks, gaps, failures, rewinds."""
        self._reader = reader
        self._mirror = mirror
        self._clock = clock
        self._cursor: Cursor | None = None

    def step(self, timeout_s: float) -> bool:
        """Reads and applies once, waiting up to `timeout_s` for an entry.

        Returns False when the caller should pause: the directory did not answer, or its log had a gap right after a look.
        """
        try:
            looked = self._cursor is None
            cursor = self._look() if self._cursor is None else self._repair(self._cursor)
            tail = self._reader.read(cursor, timeout_s)
            now = self._clock()
            for entry in tail.entries:
                self._mirror.apply(entry, now)
            self._cursor = tail.cursor
            self._mirror.note_progress(now, tail.newest - tail.cursor.position)
        except LogGap as gap:
            _log.info("reading the directory's snapshots again: %s", gap)
            self.counts["gaps"] += 1
            self._cursor = None
            self.connected, self.problem = True, ""
            return not looked
        except DirectoryUnavailable as error:
            if self.connected:
                _log.warning("the mirror is on its own: %s", error)
            self.counts["failures"] += 1
            self.connected = False
            self.problem = str(error)
            self._cursor = None
            return False
        self.connected, self.problem = True, ""
        return True

    def _look(self) -> Cursor:
        """Reads all snapshots that tell something new; returns where to read on."""
        self.counts["looks"] += 1
        tip = self._reader.tip()
        self._mirror.begin(tip.newest)
        start = tip.newest
        for info in self._reader.pools():
            start = min(start, info.at)
            if not self._mirror.is_current(info):
                start = min(start, self._load(info.writer.pool, start))
        return Cursor(tip.life, _reachable(tip, start))

    def _repair(self, cursor: Cursor) -> Cursor:
        """Reads the snapshots that the mirror wants; returns where to read on, which may be further back."""
        start = cursor.position
        for pool in self._mirror.wants_snapshot(self._clock()):
            start = min(start, self._load(pool, start))
        if start == cursor.position:
            return cursor
        self.counts["rewinds"] += 1
        return Cursor(cursor.life, _reachable(self._reader.tip(), start))

    def _load(self, pool: str, position: int) -> int:
        """Gives the mirror the snapshot of `pool`; returns the position it was taken at, `position` without one."""
        try:
            stored = self._reader.snapshot(pool)
        except MalformedEntry as error:
            _log.warning("%s", error)
            stored = None
        now = self._clock()
        if stored is None:
            self._mirror.snapshot_failed(pool, now)
        elif self._mirror.load(stored, now):
            return stored.at
        return position


def _reachable(tip: Tip, position: int) -> int:
    """Returns `position`, or where the log begins if that is later."""
    return max(position, tip.oldest - 1) if tip.oldest else tip.newest


class FollowerThread:
    """Steps a follower of `reader` until `close()`, which also closes the reader."""

    def __init__(
        self,
        reader: DirectoryReader,
        mirror: Mirror,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        read_s: float = 0.2,
    ) -> None:
        self.follower = Follower(reader, mirror, clock)
        self.failure: BaseException | None = None
        self._reader = reader
        self._rng = rng
        self._read_s = read_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-follower", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops following; the mirror stays as it is. Idempotent."""
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        pause_s = FIRST_RETRY_S
        try:
            while not self._stop.is_set():
                if self.follower.step(self._read_s):
                    pause_s = FIRST_RETRY_S
                else:
                    self._stop.wait(pause_s * (0.5 + self._rng.random()))
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)
        except BaseException as error:
            self.failure = error
            _log.exception("the follower has ended")
        finally:
            self._reader.close()
