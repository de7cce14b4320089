"""A process's copy of the directory: which pool holds which keys, how busy its replicas are, and how sure that is.

One thread (the follower) writes, any number read. All pools' keys are in one table (`key_table.py`), where each pool
whose keys are known has a slot. A pool is `whole` while every batch since its snapshot arrived in order and the
digest after each was right; when one is missing, or a digest differs, its keys are dropped at once, and
`wants_snapshot` says that it needs a new one. Entries that were seen before change nothing.

Another writer of a pool (other incarnation or epoch) means that the keys known of it are worthless: dropped at once.
In the log the later writer is the right one, because the fence lets nobody else write after it. What is known of the
replicas' load stays with the region: it outlives a publisher, which another process may have replaced, and ends with
the incarnation.

Signs of life are entries that arrive for the first time. One late heartbeat (`suspect_s`) makes a pool suspect; after
its lease it is no longer in the view, though its keys are kept: a pool that was only paused is back with its next
heartbeat, if number and digest still agree. After `forget_leases` leases it is forgotten. A pool that was read from a
snapshot and has not been heard since is not in the view: old data in the directory never becomes a route.

Matching relies on a pool that has a key having all keys before it, at every moment: see `kernels/depths.py`. A
snapshot fills a slot of its own and takes the place of what was known of the pool when it is complete. A batch is
applied in one step.

Readers see the state between two batches of the log, and between two slices of something longer: a snapshot, or a
pool's keys being dropped, which are out of sight at once and are taken out little by little with the entries that
follow. `version` says whether what was read of the pools still holds. A slot that was read stays without meaning for
a while after its pool lost it, so that depths that are read a moment later are 0 for it, not another pool's.

Memory: that of the table (`key_table.py`), 38 to 52 bytes a key however many pools hold it, and some 9 more for every
64 pools where more than seven do. Keys that were dropped count until they are taken out. Pools beyond `max_pools` and
keys beyond `max_keys` of a pool are not taken, and counted.

Limits: as the table's. While a snapshot is read in, each look-up counts holders one by one, which takes a little longer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.directory.backend import LogEntry, PoolInfo, StoredSnapshot
from kvpool.directory.errors import MalformedEntry
from kvpool.directory.messages import Batch, Gone, Heartbeat, Message, ReplicaLoad, Snapshot, Writer, split_keys
from kvpool.keys import KEY_BYTES
from router.beats import Beats
from router.key_table import NO_SLOT, KeyTable
from router.writer_clock import WriterClock

_MOMENT_S = 5e-5


@dataclass(frozen=True, slots=True)
class MirrorLimits:
    """Times and sizes of a mirror."""

    suspect_s: float = 0.5
    forget_leases: float = 10.0
    first_retry_s: float = 0.05
    longest_retry_s: float = 4.0
    max_pools: int = 1024
    max_keys: int = 1 << 24


class PoolView(NamedTuple):
    """One pool as the router sees it. `whole` false: its keys are not known just now, its load is.

    `slot`: its index in what `Mirror.depths` returns; one whose depth is always 0 when the pool is not whole.
    `age_s`: since its last sign of life. `load_age_s`: since the writer looked at `free_blocks` and `replicas`, which a
    heartbeat brought (`writer_clock.py`); infinite until there was one (both are empty then). A new epoch of the same region
    keeps all three.
    """

    pool: str
    incarnation: int
    epoch: int
    state: Literal["live", "suspect"]
    whole: bool
    free_blocks: int
    replicas: tuple[ReplicaLoad, ...]
    seq: int
    key_blocks: int
    slot: int
    age_s: float
    load_age_s: float
    lease_s: float

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Those that share the pool."""
        return tuple(one.replica_id for one in self.replicas)


@dataclass(slots=True)
class _Pool:
    writer: Writer
    lease_s: float
    known_since: float
    seq: int = 0
    digest: int = 0
    slot: int = NO_SLOT
    at: int = 0  # entries up to here are in the snapshot
    heard_at: float | None = None
    heard_position: int = 0
    free_blocks: int = 0
    replicas: tuple[ReplicaLoad, ...] = ()
    load_at: float = -math.inf
    clock: WriterClock = field(default_factory=WriterClock)
    retry_at: float = 0.0
    pause_s: float = 0.0

    @property
    def whole(self) -> bool:
        return self.slot != NO_SLOT


class Mirror:
    """See above. Times are monotonic seconds, given by the caller."""

    def __init__(
        self,
        limits: MirrorLimits | None = None,
        default_lease_s: float = 3.0,
        give_way: Callable[[], None] = lambda: time.sleep(_MOMENT_S),
    ) -> None:
        """`default_lease_s` holds for a pool until its first heartbeat. `give_way`: see `KeyTable`."""
        self._limits = limits or MirrorLimits()
        self._default_lease_s = default_lease_s
        self._table = KeyTable(give_way)
        self._pools: dict[str, _Pool] = {}
        self._newest = 0  # the highest position seen: what comes later is a sign of life
        self._caught_up_at: float | None = None
        self._behind = 0
        self.version = 0
        """Another number whenever a pool comes or goes, its writer changes, or whether and in which slot its keys are known."""
        self._beats = Beats()
        self.counts: Counter[str] = Counter()
        """entries, keys_added, keys_removed, duplicates, malformed, gaps, digest_mismatches, replaced_writers,
        resyncs, overflows, expired."""

    # Readers

    def depths(self, packed: bytes) -> npt.NDArray[np.int32]:
        """Returns how many of the packed keys, from the first on, each pool holds, by `PoolView.slot`.

        It is 0 for a pool that is not whole, and for slots that are nobody's. Raises ValueError for a torn key.
        """
        return self._table.depths(packed)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Returns how many of `keys`, from the first on, each pool holds; only pools whose keys are known."""
        depths = self.depths(b"".join(keys)).tolist()
        return {
            name: depths[pool.slot]
            for name, pool in self._pools.items()
            if 0 < pool.slot < len(depths) and pool.heard_at is not None
        }

    def pools(self, now: float) -> list[PoolView]:
        """Returns the pools whose lease holds at `now`, by name."""
        return [view for name, pool in sorted(self._pools.items()) if (view := self._view(name, pool, now)) is not None]

    def view(self, pool: str, now: float) -> PoolView | None:
        """Returns what `pools` has for this one; None for nothing."""
        known = self._pools.get(pool)
        return None if known is None else self._view(pool, known, now)

    @property
    def beats(self) -> int:
        """How many heartbeats have brought the load of a pool so far."""
        return self._beats.count

    def beaten_since(self, mark: int) -> tuple[str, ...] | None:
        """Returns the pools whose loads came with the heartbeats mark + 1 to `beats`; None when that is too long ago."""
        return self._beats.since(mark)

    def keys(self, pool: str) -> set[bytes]:
        """Returns what is known to be in `pool`; empty for a pool that is unknown or not whole.

        It goes through all keys of all pools, in pieces: of what comes or goes meanwhile, some is in it and some is not.
        """
        while True:
            known = self._pools.get(pool)
            slot = known.slot if known is not None else NO_SLOT
            keys = set(split_keys(self._table.keys(slot)))
            after = self._pools.get(pool)
            if slot == (after.slot if after is not None else NO_SLOT):
                return keys

    def memory_bytes(self) -> int:
        """Returns the memory of the table of keys."""
        return self._table.memory_bytes()

    def lag_s(self, now: float) -> float:
        """Returns for how long the mirror has not been at the end of the log (infinite: never was)."""
        return float("inf") if self._caught_up_at is None else max(0.0, now - self._caught_up_at)

    def lag_entries(self) -> int:
        """Returns how many entries of the log were known but not applied after the last read."""
        return self._behind

    def _view(self, name: str, pool: _Pool, now: float) -> PoolView | None:
        if pool.heard_at is None or now - pool.heard_at > pool.lease_s:
            return None
        age_s = max(0.0, now - pool.heard_at)
        slot = pool.slot
        return PoolView(
            pool=name,
            incarnation=pool.writer.incarnation,
            epoch=pool.writer.epoch,
            state="suspect" if age_s > self._limits.suspect_s else "live",
            whole=slot != NO_SLOT,
            free_blocks=pool.free_blocks,
            replicas=pool.replicas,
            seq=pool.seq,
            key_blocks=self._table.held(slot),
            slot=slot,
            age_s=age_s,
            load_age_s=max(0.0, now - pool.load_at),
            lease_s=pool.lease_s,
        )

    # The one writer

    def begin(self, newest: int) -> None:
        """A look at the whole directory begins; entries up to `newest` are old, so no signs of life."""
        self._newest = newest
        for pool in self._pools.values():  # of another log, positions beyond its end mean nothing
            pool.at, pool.heard_position = min(pool.at, newest), min(pool.heard_position, newest)

    def note_progress(self, now: float, behind: int) -> None:
        """The log has been read and applied up to `behind` entries before its end."""
        self._behind = behind
        if behind <= 0:
            self._caught_up_at = now

    def is_current(self, info: PoolInfo) -> bool:
        """Whether the mirror already has all that the snapshot of `info` could tell."""
        pool = self._pools.get(info.writer.pool)
        return pool is not None and pool.whole and pool.writer == info.writer

    def load(self, stored: StoredSnapshot, now: float) -> bool:
        """Takes a snapshot in place of what is known about its pool; False when it is damaged or too large.

        If the pool is known by the same writer, what was heard from it stays.
        """
        snapshot = stored.snapshot
        name = snapshot.writer.pool
        pool = self._pools.get(name)
        if pool is None or pool.writer != snapshot.writer:
            pool = self._replace(snapshot.writer, now)
            if pool is None:
                return False
        too_many = len(snapshot.keys) > self._limits.max_keys * KEY_BYTES
        slot = NO_SLOT if too_many else self._fill(snapshot)
        if slot == NO_SLOT:
            self.counts["overflows" if too_many else "digest_mismatches"] += 1
            self._distrust(pool, now)
            return False
        before = pool.slot
        self._table.show(slot)
        pool.slot, pool.seq, pool.digest, pool.at = slot, snapshot.seq, snapshot.digest, stored.at
        if before != NO_SLOT:
            self._table.drop(before, shown=True)
        self.version += 1
        self.counts["resyncs"] += 1
        return True

    def _fill(self, snapshot: Snapshot) -> int:
        """Returns a hidden slot with the keys of a snapshot; NO_SLOT when the digest is another, or a key is there twice."""
        slot = self._table.take()
        if slot == NO_SLOT:
            return slot
        self._table.expect(len(snapshot.keys) // KEY_BYTES)
        digest, expected = self._table.change(slot, b"", snapshot.keys, 0)
        if expected and digest == snapshot.digest:
            return slot
        self._table.drop(slot, shown=False)
        return NO_SLOT

    def apply(self, entry: LogEntry, now: float) -> None:
        """Takes one entry of the log, in order; repeating entries is harmless."""
        self._table.clean()
        is_new = entry.position > self._newest
        self._newest = max(self._newest, entry.position)
        message = entry.message
        if isinstance(message, MalformedEntry):
            self.counts["malformed"] += is_new
            return
        self.counts["entries"] += 1
        pool = self._pools.get(message.writer.pool)
        if pool is not None and entry.position <= pool.at:
            return
        if pool is None or pool.writer != message.writer:
            if isinstance(message, Gone) or not is_new:
                return  # an earlier writer, saying goodbye or read again
            pool = self._replace(message.writer, now)
            if pool is None:
                return
        if isinstance(message, Gone):
            self._forget(message.writer.pool)
            return
        if is_new:
            self._hear(pool, message, entry.position, now)
        if pool.whole:
            self._follow(pool, message, is_new, now)

    def wants_snapshot(self, now: float) -> list[str]:
        """Returns the pools that need one and may be tried again at `now`; forgets those that are long silent."""
        self._table.clean()
        for name, pool in list(self._pools.items()):
            last = pool.known_since if pool.heard_at is None else pool.heard_at
            if now - last > pool.lease_s * self._limits.forget_leases:
                self._forget(name)
                self.counts["expired"] += 1
        return [name for name, pool in self._pools.items() if not pool.whole and pool.retry_at <= now]

    def snapshot_failed(self, name: str, now: float) -> None:
        """No snapshot of pool `name` could be had: the next try comes after a pause that grows."""
        pool = self._pools.get(name)
        if pool is not None:
            self._distrust(pool, now)

    def _hear(self, pool: _Pool, message: Message, position: int, now: float) -> None:
        if pool.heard_at is None:
            self.version += 1
        pool.heard_at = now
        if isinstance(message, Heartbeat) and position > pool.heard_position:
            pool.heard_position = position
            pool.free_blocks, pool.replicas = message.free_blocks, message.replicas
            pool.load_at = pool.clock.read(message.told_at, now)
            pool.lease_s = message.lease_s
            self._beats.note(message.writer.pool)

    def _follow(self, pool: _Pool, message: Message, is_new: bool, now: float) -> None:
        """Brings the keys of a whole pool in step with a batch or heartbeat of its writer."""
        assert not isinstance(message, Gone)
        is_batch = isinstance(message, Batch)
        if message.seq < pool.seq + is_batch:
            self.counts["duplicates"] += 1
            return
        if message.seq > pool.seq + is_batch:
            self.counts["gaps"] += 1
            self._distrust(pool, now)
            return
        digest, expected = pool.digest, True
        if isinstance(message, Batch):
            digest, expected = self._table.change(pool.slot, message.removed, message.added, pool.digest)
            self.counts["keys_removed"] += len(message.removed) // KEY_BYTES
            self.counts["keys_added"] += len(message.added) // KEY_BYTES
        right = expected and digest == message.digest
        if not right or self._table.held(pool.slot) > self._limits.max_keys:
            self.counts["overflows" if right else "digest_mismatches"] += 1
            self._distrust(pool, now)
            return
        pool.seq, pool.digest = message.seq, digest
        if is_new:
            pool.pause_s = 0.0

    def _replace(self, writer: Writer, now: float) -> _Pool | None:
        """Begins anew with `writer` for its pool; None when there are too many pools."""
        known = self._pools.get(writer.pool)
        if known is not None:
            self.counts["replaced_writers"] += 1
        elif len(self._pools) >= self._limits.max_pools:
            self.counts["overflows"] += 1
            return None
        pool = _Pool(writer, self._default_lease_s, now)
        if known is not None and known.writer.incarnation == writer.incarnation:
            pool.free_blocks, pool.replicas, pool.load_at = known.free_blocks, known.replicas, known.load_at
            pool.lease_s = known.lease_s
        self._pools = {**self._pools, writer.pool: pool}
        if known is not None:
            self._let_go(known)
        self.version += 1
        return pool

    def _forget(self, name: str) -> None:
        known = self._pools.get(name)
        self._pools = {other: pool for other, pool in self._pools.items() if other != name}
        if known is not None:
            self._let_go(known)
        self.version += 1

    def _distrust(self, pool: _Pool, now: float) -> None:
        """Drops the keys of `pool`; a first fault is repaired at once, the next ones after growing pauses."""
        self._let_go(pool)
        pool.retry_at = now + pool.pause_s
        pool.pause_s = min(max(2 * pool.pause_s, self._limits.first_retry_s), self._limits.longest_retry_s)

    def _let_go(self, pool: _Pool) -> None:
        """From now on nothing is known of the keys of `pool`."""
        slot, pool.slot = pool.slot, NO_SLOT
        if slot != NO_SLOT:
            self._table.drop(slot, shown=True)
            self.version += 1
