"""Keeps a mirror in step with a directory: snapshots first, then the log, in a thread of its own.

Look. Take the log's tip, read the snapshot of each pool that the mirror does not have by the same writer, and go on reading
from the lowest position a snapshot was taken at; what the mirror has already, it passes over. Pools that the directory
does not list are left to their lease: a directory that came back empty says nothing about them.

Follow. Read what comes next, waiting for it; apply it. When the mirror wants the snapshot of a single pool (a missing
batch, a wrong digest, a new writer), read it and go back in the log to the position it was taken at. When the log no longer
has what comes next, or is another log, look again.

Going back helps once. Where what follows a snapshot in the log is itself wrong, only a newer snapshot helps, and until there is
one the other pools must be heard. So the log is read to where it was before it is gone back in again, and the pauses between that
grow while a pool still wants it.

When the directory does not answer, the mirror stays as it is and grows old (`Mirror.lag_s`, leases); the follower tries
again with growing pauses, and then looks.

Who has just begun to follow knows nothing and would decide blindly: `FollowerThread.wait_until_whole` tells when that is over.

Limits: a thread sees changes as soon as the directory answers its blocking read. `close()` takes up to one read
(`read_s`), or a time-out of the backend.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from kvpool.directory.backend import Cursor, DirectoryReader, Tip
from kvpool.directory.errors import DirectoryUnavailable, LogGap, MalformedEntry
from router.mirror import Mirror

_log = logging.getLogger(__name__)
FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 2.0
_FIRST_REWIND_S: Final = 0.05
_LOOK_AGAIN_S: Final = 0.02


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
        self._furthest = 0  # where the log was when it was last gone back in
        self._rewind_at = 0.0
        self._pause_s = 0.0

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
        self._furthest = 0
        self._mirror.begin(tip.newest)
        start = tip.newest
        for info in self._reader.pools():
            start = min(start, info.at)
            if not self._mirror.is_current(info):
                start = min(start, self._load(info.writer.pool, start))
        return Cursor(tip.life, _reachable(tip, start))

    def _repair(self, cursor: Cursor) -> Cursor:
        """Reads the snapshots that the mirror wants; returns where to read on, which may be further back."""
        start, now = cursor.position, self._clock()
        wanted = self._mirror.wants_snapshot(now)
        if start < self._furthest:
            return cursor
        if not wanted:
            self._pause_s = self._rewind_at = 0.0
        if now < self._rewind_at:
            return cursor
        for pool in wanted:
            start = min(start, self._load(pool, start))
        if start == cursor.position:
            return cursor
        self.counts["rewinds"] += 1
        self._furthest, self._rewind_at = cursor.position, now + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, _FIRST_REWIND_S), LONGEST_RETRY_S)
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
        self._mirror = mirror
        self._clock = clock
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

    def wait_until_whole(self, replica_ids: Collection[str], timeout_s: float) -> bool:
        """Waits until the mirror was at the end of the log and has the keys of the pools of all these replicas.

        Returns False when that took longer than `timeout_s`, when following has ended, or was closed. Blocks.
        """
        deadline = self._clock() + timeout_s
        while self.alive:
            now = self._clock()
            known = {one for view in self._mirror.pools(now) if view.whole for one in view.replica_ids}
            if math.isfinite(self._mirror.lag_s(now)) and known.issuperset(replica_ids):
                return True
            if now >= deadline or self._stop.wait(_LOOK_AGAIN_S):
                break
        return False

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
