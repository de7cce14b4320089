"""A directory inside a replay: what publishers write is read `lag_s` of simulated time later, in order.

It has the two sides that Redis has for the product (`kvpool/directory/backend.py`), so the publisher and the follower of the
product run over it. Nothing is lost, refused or trimmed here: what a directory does when things go wrong is not what a replay
is for.

The lag stands for all of it: publisher, Redis, network, follower. A snapshot is as old as the log that is visible with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpool.directory.backend import Cursor, LogEntry, PoolInfo, StoredSnapshot, Tail, Tip
from kvpool.directory.messages import Message, Snapshot

_LIFE: Final = "replay"


class DelayedDirectory:
    """Writer of every pool and reader of every router. `clock` gives simulated seconds."""

    def __init__(self, lag_s: float, clock: Callable[[], float]) -> None:
        self._lag_s = lag_s
        self._clock = clock
        self._log: list[LogEntry] = []
        self._visible_at: list[float] = []
        self._visible = 0
        self._snapshots: dict[str, StoredSnapshot] = {}

    def open(self, snapshot: Snapshot) -> int:
        """See `DirectoryWriter`. Seen at once: sessions open before the first request comes."""
        return self.replace_snapshot(snapshot)

    def write(self, message: Message) -> int:
        """See `DirectoryWriter`."""
        self._log.append(LogEntry(len(self._log) + 1, message))
        self._visible_at.append(self._clock() + self._lag_s)
        return len(self._log)

    def replace_snapshot(self, snapshot: Snapshot) -> int:
        """See `DirectoryWriter`. Only those of the beginning are kept: nobody has to read a later one."""
        self._snapshots.setdefault(snapshot.writer.pool, StoredSnapshot(snapshot, len(self._log)))
        return len(self._log)

    def tip(self) -> Tip:
        """See `DirectoryReader`."""
        return Tip(_LIFE, 1 if self._log else 0, self._seen())

    def pools(self) -> list[PoolInfo]:
        """See `DirectoryReader`."""
        return [PoolInfo(one.snapshot.writer, one.snapshot.seq, one.at) for one in self._snapshots.values()]

    def snapshot(self, pool: str) -> StoredSnapshot | None:
        """See `DirectoryReader`."""
        return self._snapshots.get(pool)

    def read(self, cursor: Cursor, timeout_s: float) -> Tail:
        """See `DirectoryReader`; never waits."""
        newest = self._seen()
        entries = tuple(self._log[cursor.position : newest])
        return Tail(entries, Cursor(_LIFE, max(cursor.position, newest)), newest)

    def close(self) -> None:
        """See `DirectoryWriter` and `DirectoryReader`."""

    def _seen(self) -> int:
        """The newest position that is visible now."""
        now = self._clock()
        while self._visible < len(self._log) and self._visible_at[self._visible] <= now:
            self._visible += 1
        return self._visible
