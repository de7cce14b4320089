"""A directory inside one process: the reference of what a backend does, and the one for tests.

A `MemoryServer` holds any number of spaces; writers and readers are made for one of them and share it. Messages are kept
as bytes and decoded by each reader, as they would be over a network. One lock guards everything; a reader that waits is
woken by the next write.

Limits: as `backend.py` says; the log keeps exactly `log_entries`. Nothing survives the process.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.directory import messages
from kvpool.directory.backend import (
    Bounds,
    Cursor,
    LogEntry,
    PoolInfo,
    Space,
    StoredSnapshot,
    Tail,
    Tip,
)
from kvpool.directory.errors import DirectoryUnavailable, LogGap, MalformedEntry, WriteRefused
from kvpool.directory.messages import Batch, Gone, Heartbeat, Message, Snapshot, Writer

READ_ENTRIES = 256


@dataclass(slots=True)
class _Pool:
    writer: Writer
    seq: int
    snapshot: Snapshot
    at: int
    heard: float


@dataclass(slots=True)
class ExchangeState:
    """The log of the routers (life "": there is none), and the claims: key -> holder, end of its life."""

    life: str = ""
    newest: int = 0
    log: deque[tuple[int, bytes]] = field(default_factory=deque)
    heard: float = 0.0
    claims: dict[bytes, tuple[str, float]] = field(default_factory=dict)


@dataclass(slots=True)
class SpaceState:
    """All that is known about one space."""

    life: str
    newest: int = 0
    log: deque[tuple[int, bytes]] = field(default_factory=deque)
    pools: dict[str, _Pool] = field(default_factory=dict)
    exchange: ExchangeState = field(default_factory=ExchangeState)


class MemoryServer:
    """The memory that writers and readers share. `clock` gives seconds; `rng` names the logs."""

    def __init__(
        self, rng: random.Random, bounds: Bounds | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.spaces: dict[Space, SpaceState] = {}
        self.bounds = bounds or Bounds()
        self.clock = clock
        self.changed = threading.Condition()
        self.up = True
        self._rng = rng

    def nonce(self) -> str:
        """Returns a new name for a log."""
        return f"{self._rng.getrandbits(64):016x}"

    def state(self, space: Space) -> SpaceState:
        """Returns the state of `space`, new or old, without pools that are silent for too long.

        The caller has the lock. Raises DirectoryUnavailable while the server is not `up`.
        """
        if not self.up:
            raise DirectoryUnavailable("the directory in memory is switched off")
        state = self.spaces.get(space)
        if state is None:
            state = self.spaces[space] = SpaceState(self.nonce())
        oldest = self.clock() - self.bounds.retention_s
        for name in [name for name, pool in state.pools.items() if pool.heard < oldest]:
            del state.pools[name]
        return state


class MemoryWriter:
    """A `DirectoryWriter` of one space of a server."""

    def __init__(self, server: MemoryServer, space: Space) -> None:
        self._server = server
        self._space = space

    def open(self, snapshot: Snapshot) -> int:
        """See `DirectoryWriter`."""
        with self._server.changed:
            state = self._server.state(self._space)
            writer = snapshot.writer
            state.pools[writer.pool] = _Pool(writer, snapshot.seq, snapshot, state.newest, self._server.clock())
            return state.newest

    def write(self, message: Message) -> int:
        """See `DirectoryWriter`."""
        with self._server.changed:
            state = self._server.state(self._space)
            pool = _fenced(state, message.writer, message.seq, 1 if isinstance(message, Batch) else 0)
            pool.seq = message.seq
            if isinstance(message, Heartbeat):
                pool.heard = self._server.clock()
            if isinstance(message, Gone):
                del state.pools[message.writer.pool]
            append(state, messages.encode(message), self._server.bounds.log_entries)
            self._server.changed.notify_all()
            return state.newest

    def replace_snapshot(self, snapshot: Snapshot) -> int:
        """See `DirectoryWriter`."""
        with self._server.changed:
            state = self._server.state(self._space)
            pool = _fenced(state, snapshot.writer, snapshot.seq, 0)
            pool.snapshot, pool.at = snapshot, state.newest
            return state.newest

    def close(self) -> None:
        """See `DirectoryWriter`."""


class MemoryReader:
    """A `DirectoryReader` of one space of a server."""

    def __init__(self, server: MemoryServer, space: Space) -> None:
        self._server = server
        self._space = space

    def tip(self) -> Tip:
        """See `DirectoryReader`."""
        with self._server.changed:
            state = self._server.state(self._space)
            return Tip(state.life, state.log[0][0] if state.log else 0, state.newest)

    def pools(self) -> list[PoolInfo]:
        """See `DirectoryReader`."""
        with self._server.changed:
            pools = self._server.state(self._space).pools.values()
            return [PoolInfo(pool.writer, pool.seq, pool.at) for pool in pools]

    def snapshot(self, pool: str) -> StoredSnapshot | None:
        """See `DirectoryReader`."""
        with self._server.changed:
            known = self._server.state(self._space).pools.get(pool)
            return None if known is None else StoredSnapshot(known.snapshot, known.at)

    def read(self, cursor: Cursor, timeout_s: float) -> Tail:
        """See `DirectoryReader`."""
        deadline = time.monotonic() + timeout_s
        with self._server.changed:
            while True:
                state = self._server.state(self._space)
                if state.life != cursor.life or state.newest < cursor.position:
                    raise LogGap(f"the log is not the one of position {cursor.position}")
                left = deadline - time.monotonic()
                if state.newest > cursor.position or left <= 0:
                    break
                self._server.changed.wait(left)
            found = [(position, data) for position, data in state.log if position > cursor.position][:READ_ENTRIES]
            newest = state.newest
        if found and found[0][0] != cursor.position + 1:
            raise LogGap(f"the log begins at {found[0][0]}, the cursor is at {cursor.position}")
        entries = tuple(LogEntry(position, decoded(data)) for position, data in found)
        return Tail(entries, Cursor(cursor.life, found[-1][0] if found else cursor.position), newest)

    def close(self) -> None:
        """See `DirectoryReader`."""


def decoded(data: bytes) -> Message | MalformedEntry:
    """Returns the message in `data`, or why there is none."""
    try:
        return messages.decode(data)
    except MalformedEntry as error:
        return error


def append(state: SpaceState, data: bytes, log_entries: int) -> None:
    """Adds an entry to the log of `state` and cuts it to `log_entries`."""
    state.newest += 1
    state.log.append((state.newest, data))
    while len(state.log) > log_entries:
        state.log.popleft()


def _fenced(state: SpaceState, writer: Writer, seq: int, step: int) -> _Pool:
    """Returns the pool of `writer` if it may write `seq` now. Raises WriteRefused."""
    pool = state.pools.get(writer.pool)
    if pool is None:
        raise WriteRefused(writer.pool, "unknown", "nobody has opened it")
    if pool.writer.incarnation != writer.incarnation:
        raise WriteRefused(writer.pool, "incarnation", "another life of the region has the fence")
    if pool.writer.epoch != writer.epoch:
        raise WriteRefused(writer.pool, "epoch", "another publisher has the fence")
    if seq != pool.seq + step:
        raise WriteRefused(writer.pool, "seq", f"got {seq}, expected {pool.seq + step}")
    return pool
