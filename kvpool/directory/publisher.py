"""Keeps the directory in step with one pool: one step at a time, without a thread of its own (`publisher_thread.py`).

A step looks at what changed in the region (`shadow.py`) and, while a session is open, sends it as batches, each with the
next number and the digest after it; then a heartbeat if one is due (every `heartbeat_s`, and when the load changed); then
a new snapshot if the tail behind the last one has grown.

A session is an epoch: a fresh nonce, opened with a snapshot of what is published now, and numbers from 0. There is one way
out of every doubt, namely a new session. When the directory does not answer, the session is over (whether its last write
was done does not matter); the shadow goes on following the region, which costs no memory, and a new session is tried
with growing pauses. So an outage ends with a snapshot, and it makes no difference whether Redis came back empty or with
old data. The same when the directory says that it does not know this pool, or expected another number.

One process at a time publishes a region that several share: whoever has the role, which `may_open` tells. It is asked at every
step outside of a session. Without the role a publisher stands by: it neither looks at the region, whose dirty bits are for the
one who publishes, nor speaks to the directory, and holds no memory. When it gets the role it begins anew: it looks at all
blocks, several steps long where there are many, and then opens a session.

When the directory says that another writer has the fence, this publisher is over: it says so once (`on_fence_lost`), looks at
nothing and never writes again. One exception: the other published the same life of the region, and yet the role is ours. Then
the directory came back with old data, and the answer is a new session.

Limits: load changes are sent at most every `load_s`; the callables must be quick and are called in the publisher's thread.
A step blocks while the directory does, at most the backend's time-out for each call. A publisher that was stopped in a
session, and goes on after another took its role, takes dirty bits until its next write is refused, at most for `heartbeat_s`:
what they stood for is found by the other's next look at all words.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvpool.control import Control
from kvpool.directory.backend import Bounds, DirectoryWriter
from kvpool.directory.digest import changed, digest_of
from kvpool.directory.errors import DirectoryUnavailable, WriteRefused
from kvpool.directory.messages import (
    MAX_BATCH_KEYS,
    Batch,
    Gone,
    Heartbeat,
    Message,
    PoolLoad,
    Snapshot,
    Writer,
)
from kvpool.directory.shadow import Changes, Shadow

_log = logging.getLogger(__name__)

State = Literal["standby", "waiting", "open", "lost", "closed"]
"""Another one publishes; this one would, but has no session; it does; its fence is another's; it has ended."""

_CATCH_UP_BATCHES: Final = 8
"""How many batches' worth of changes a step looks at when they need not be sent."""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Times of a publisher. `lease_s` is what it promises; a heartbeat must fit into it several times."""

    full_scan_s: float = 0.3
    heartbeat_s: float = 0.2
    load_s: float = 0.05
    lease_s: float = 3.0
    snapshot_s: float = 60.0
    tail_keys: int = 4096
    first_retry_s: float = 0.1
    longest_retry_s: float = 2.0
    batch_keys: int = MAX_BATCH_KEYS

    def __post_init__(self) -> None:
        if not 1 <= self.batch_keys <= MAX_BATCH_KEYS:
            raise ValueError(f"a batch has 1 to {MAX_BATCH_KEYS} keys each way, got {self.batch_keys}")


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters since the start, and the present.

    `lag_s`: for how long the directory has not been in step; 0 while another one publishes, as are `published_blocks`.
    """

    state: State
    epoch: int
    seq: int
    published_blocks: int
    batches: int
    keys_added: int
    keys_removed: int
    heartbeats: int
    snapshots: int
    sessions: int
    failures: int
    refused: dict[str, int]
    lag_s: float


class Publisher:
    """The publisher of one pool. `clock` gives monotonic seconds, `rng` nonces and pauses. Not thread-safe."""

    def __init__(
        self,
        control: Control,
        pool: str,
        incarnation: int,
        writer: DirectoryWriter,
        *,
        load: Callable[[], PoolLoad],
        clock: Callable[[], float],
        rng: random.Random,
        settings: PublisherSettings | None = None,
        bounds: Bounds | None = None,
        may_open: Callable[[], bool] = lambda: True,
        on_fence_lost: Callable[[WriteRefused], None] = lambda refused: None,
    ) -> None:
        """`control` is a window of its own on the region, `bounds` those of the directory; `writer` stays the
        caller's to close. `load` tells of all replicas that share the pool; `may_open` takes the role if it is free, and says
        whether this process has it.
        """
        self._control = control
        self._writer = writer
        self._load = load
        self._clock = clock
        self._rng = rng
        self._settings = settings or PublisherSettings()
        self._log_entries = (bounds or Bounds()).log_entries
        self._may_open = may_open
        self._on_fence_lost = on_fence_lost
        self._shadow = Shadow(control)
        self._who = Writer(pool, incarnation, rng.getrandbits(64))
        self._state: State = "waiting"
        self._seq = 0
        self._digest = 0
        self._position = 0
        self._snapshot_position = 0
        self._snapshot_at = 0.0
        self._tail_keys = 0
        self._next_full = self._retry_at = self._behind_since = clock()
        self._pause_s = self._settings.first_retry_s
        self._sent: PoolLoad | None = None
        self._sent_at = 0.0
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def step(self) -> bool:
        """Looks, and sends what is due. Returns whether something changed; never raises what a directory raises."""
        now = self._clock()
        if self._state in ("lost", "closed") or (self._state != "open" and not self._has_role(now)):
            return False
        everything = now >= self._next_full
        if everything:
            self._next_full = now + self._settings.full_scan_s
        limit = self._settings.batch_keys * (1 if self._state == "open" else _CATCH_UP_BATCHES)
        changes = self._shadow.scan(everything, limit)
        try:
            if self._state == "open":
                self._send(changes)
                self._send_heartbeat(now)
                self._renew_snapshot(now)
            elif now >= self._retry_at and len(changes.removed) + len(changes.added) < limit:
                self._open(now)
        except DirectoryUnavailable as error:
            self._interrupt(now, error)
        except WriteRefused as refused:
            self._refused[refused.reason] += 1
            if refused.fence_lost and not (refused.reason == "epoch" and self._may_open()):
                self._state = "lost"
                self._shadow = Shadow(self._control)  # nothing is read by it; the old one's memory is given back
                _log.error("pool %s is no longer ours to publish: %s", self._who.pool, refused)
                self._on_fence_lost(refused)
            else:
                self._interrupt(now, refused)
        if self._state == "open" and not self._shadow.pending:
            self._behind_since = self._clock()
        return bool(changes) or self._shadow.pending > 0

    @property
    def stands_by(self) -> bool:
        """Whether another one publishes; stepping this one now and then is enough."""
        return self._state == "standby"

    def close(self, goodbye: bool = True) -> None:
        """Ends the session; with `goodbye` the pool leaves the directory now, not when its lease ends. Idempotent."""
        if self._state == "open" and goodbye:
            try:
                self._position = self._writer.write(Gone(self._who, self._seq))
            except (DirectoryUnavailable, WriteRefused) as error:
                _log.warning("pool %s left without a goodbye: %s", self._who.pool, error)
        self._state = "closed"

    def stats(self) -> PublisherStats:
        """Returns the counters; may be called from another thread, which then sees a mixture of two steps at worst."""
        counts = self._counts
        return PublisherStats(
            state=self._state,
            epoch=self._who.epoch,
            seq=self._seq,
            published_blocks=len(self._shadow),
            batches=counts["batches"],
            keys_added=counts["keys_added"],
            keys_removed=counts["keys_removed"],
            heartbeats=counts["heartbeats"],
            snapshots=counts["snapshots"],
            sessions=counts["sessions"],
            failures=counts["failures"],
            refused=dict(self._refused),
            lag_s=max(0.0, self._clock() - self._behind_since),
        )

    def _has_role(self, now: float) -> bool:
        """Whether this one may open a session. Stands by without the role; with it again, all is looked at anew."""
        if self._may_open():
            if self._state == "standby":
                self._state = "waiting"
                self._next_full = self._retry_at = now
                self._pause_s = self._settings.first_retry_s
            return True
        if self._state != "standby":
            self._state = "standby"
            self._shadow = Shadow(self._control)
        self._behind_since = now
        return False

    def _open(self, now: float) -> None:
        """Begins a session with a fresh epoch and all that is published now."""
        self._who = Writer(self._who.pool, self._who.incarnation, self._rng.getrandbits(64))
        self._seq = 0
        self._sent = None
        snapshot = self._snapshot()
        self._digest = snapshot.digest
        self._position = self._writer.open(snapshot)
        self._state = "open"
        self._pause_s = self._settings.first_retry_s
        self._counts["sessions"] += 1
        self._note_snapshot(now)
        _log.info("pool %s is in the directory with %d blocks", self._who.pool, len(self._shadow))
        self._send_heartbeat(now)

    def _interrupt(self, now: float, error: Exception) -> None:
        """The session is over; the next one is tried after a pause that grows and varies."""
        if self._state == "open" or self._pause_s == self._settings.first_retry_s:
            _log.warning("pool %s is not in step with the directory: %s", self._who.pool, error)
        self._state = "waiting"
        self._counts["failures"] += 1
        self._retry_at = now + self._pause_s * (0.5 + self._rng.random())
        self._pause_s = min(2 * self._pause_s, self._settings.longest_retry_s)

    def _send(self, changes: Changes) -> None:
        """Writes `changes` as batches: what is removed first, then what is added."""
        size = self._settings.batch_keys
        removed = [b"".join(changes.removed[start : start + size]) for start in range(0, len(changes.removed), size)]
        added = [b"".join(changes.added[start : start + size]) for start in range(0, len(changes.added), size)]
        together = 1 if removed and added else 0
        for number in range(len(removed) + len(added) - together):
            out = removed[number] if number < len(removed) else b""
            place = number - len(removed) + together
            into = added[place] if place >= 0 and added else b""
            self._digest = changed(self._digest, out, into)
            self._seq += 1
            self._write(Batch(self._who, self._seq, out, into, self._digest))
            self._tail_keys += (len(out) + len(into)) // 16
            self._counts["batches"] += 1
            self._counts["keys_removed"] += len(out) // 16
            self._counts["keys_added"] += len(into) // 16

    def _send_heartbeat(self, now: float) -> None:
        """Writes a heartbeat if it is time, or the load changed a while after the last one."""
        due = self._sent is None or now - self._sent_at >= self._settings.heartbeat_s
        if not due and now - self._sent_at < self._settings.load_s:
            return
        told_at = self._clock()  # `now` may be older by all that was published since
        load = self._load()
        if due or load != self._sent:
            lease_s = self._settings.lease_s
            what = (load.free_blocks, load.replicas, told_at)
            self._write(Heartbeat(self._who, self._seq, self._digest, lease_s, *what))
            self._sent, self._sent_at = load, now
            self._counts["heartbeats"] += 1

    def _renew_snapshot(self, now: float) -> None:
        """Replaces the snapshot when the way from it to the present has become long, or it is old."""
        tail_full = self._tail_keys > max(self._settings.tail_keys, len(self._shadow))
        trimmed_soon = self._tail_keys > 0 and self._position - self._snapshot_position > self._log_entries // 4
        if tail_full or trimmed_soon or now - self._snapshot_at > self._settings.snapshot_s:
            self._position = self._writer.replace_snapshot(self._snapshot())
            self._note_snapshot(now)

    def _snapshot(self) -> Snapshot:
        keys = self._shadow.packed()
        return Snapshot(self._who, self._seq, keys, digest_of(keys))

    def _note_snapshot(self, now: float) -> None:
        self._snapshot_position, self._snapshot_at, self._tail_keys = self._position, now, 0
        self._counts["snapshots"] += 1

    def _write(self, message: Message) -> None:
        self._position = self._writer.write(message)
