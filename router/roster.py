"""The candidates of a decision as columns, ready for arithmetic: where each one's pool is in the mirror, and how busy it is.

A replica lives in the live pool whose heartbeat names it, in the one heard last where two do. Columns are made once for each
list of candidates and kept: the lists that Serve asks about are few and seldom change. They are made anew when the mirror's
version changes, when a lease may have ended, or when a heartbeat names other replicas than the one before; a heartbeat that
only brings new load changes the rows of its replicas. So a decision costs a few operations on whole columns, whatever happens
to the pools meanwhile.

Columns are never written to once they are made, because decisions keep them. Thread-safe.

Limits: of lists of candidates the last `KEPT` are remembered.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import numpy as np

from kvpool.directory.messages import ReplicaLoad
from router.booking_table import Roll, reported
from router.bookings import SETTLE_S
from router.mirror import Mirror, PoolView
from router.view import FloatColumn, IntColumn

KEPT: Final = 4


class Home(NamedTuple):
    """Where a replica lives: its pool, and what the pool's last heartbeat tells of the replica itself."""

    pool: PoolView
    load: ReplicaLoad
    reported_at: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """Those in a live pool (`replica_ids`), and the others, of which nothing is known; `asked` is all, in the order given.

    `slots`: of the pools in the mirror, an array at the address `slots_at`. `places`: of `replica_ids` by name.
    """

    asked: list[str]
    replica_ids: tuple[str, ...]
    unheard: tuple[str, ...]
    roll: Roll
    slots: IntColumn
    slots_at: int
    places: dict[str, int]


class Columns:
    """Candidates in a live pool, as columns: what the last heartbeat said of each. They are rows of one array."""

    __slots__ = ("candidates", "reported", "words")

    def __init__(self, candidates: Candidates, words: IntColumn) -> None:
        """`words`: the columns in the order below, those of numbers with a fraction as their bits."""
        self.candidates = candidates
        self.words = words
        self.reported = reported(candidates.roll, candidates.slots, candidates.slots_at, words)
        """What bookings are added to."""

    @property
    def queued_tokens(self) -> IntColumn:
        """Prompt tokens that each has yet to compute."""
        return cast("IntColumn", self.words[0])

    @property
    def running(self) -> IntColumn:
        """Requests that decode."""
        return cast("IntColumn", self.words[1])

    @property
    def settled_at(self) -> FloatColumn:
        """Requests accepted until then are in the heartbeat."""
        return cast("FloatColumn", self.words[2].view(np.float64))

    @property
    def waiting(self) -> IntColumn:
        """Requests that wait."""
        return cast("IntColumn", self.words[3])

    @property
    def free_tokens(self) -> IntColumn:
        """Room in the pool that holds nothing."""
        return cast("IntColumn", self.words[4])

    @property
    def held_tokens(self) -> IntColumn:
        """What the pool has cached."""
        return cast("IntColumn", self.words[5])

    @property
    def prefill_tokens_per_s(self) -> FloatColumn:
        """Measured by the replica; 0 where nothing is."""
        return cast("FloatColumn", self.words[6].view(np.float64))


class Roster:
    """See above. Times are those of `mirror`'s clock."""

    def __init__(self, mirror: Mirror, block_tokens: int) -> None:
        self._mirror = mirror
        self._block_tokens = block_tokens
        self._version = -1
        self._beats = 0
        self._expires_at = -math.inf
        self._pools: dict[str, PoolView] = {}
        self._homes: dict[str, Home] = {}
        self._kept: list[Columns] = []
        self._lock = threading.Lock()

    def columns(self, replica_ids: Sequence[str], now: float) -> Columns:
        """Returns the columns of these candidates, in their order; of one moment not before this call."""
        asked = replica_ids if isinstance(replica_ids, list) else list(replica_ids)
        with self._lock:
            self._refresh(now)
            for place, columns in enumerate(self._kept):
                if columns.candidates.asked == asked:
                    if place:
                        self._kept.insert(0, self._kept.pop(place))
                    return columns
            made = self._made(asked.copy())
            self._kept = [made, *self._kept[: KEPT - 1]]
            return made

    def everyone(self, now: float) -> Columns:
        """Returns the columns of all replicas that live pools name."""
        with self._lock:
            self._refresh(now)
            everyone = list(self._homes)
        return self.columns(everyone, now)

    def _refresh(self, now: float) -> None:
        mirror = self._mirror
        if mirror.version != self._version or now > self._expires_at:
            self._look(now)
        elif mirror.beats != self._beats:
            beats = mirror.beats
            names = mirror.beaten_since(self._beats)
            if names is None or not self._take(names, now):
                self._look(now)
            else:
                self._beats = beats

    def _look(self, now: float) -> None:
        """Takes all pools anew."""
        self._kept = []
        # Read before the pools, so that what changes meanwhile is seen as a change next time.
        self._version, self._beats = self._mirror.version, self._mirror.beats
        pools = self._mirror.pools(now)
        self._expires_at = min((now - pool.age_s + pool.lease_s for pool in pools), default=math.inf)
        self._pools = {pool.pool: pool for pool in pools}
        homes: dict[str, Home] = {}
        for pool in pools:
            for load in pool.replicas:
                known = homes.get(load.replica_id)
                if known is None or pool.age_s < known.pool.age_s:
                    homes[load.replica_id] = Home(pool, load, now - pool.load_age_s)
        self._homes = homes

    def _take(self, names: Sequence[str], now: float) -> bool:
        """Takes the new load of these pools; False when more than load has changed."""
        changed: dict[str, Home] = {}
        for name in dict.fromkeys(names):
            before, pool = self._pools.get(name), self._mirror.view(name, now)
            if before is None or pool is None or len(before.replicas) != len(pool.replicas):
                return False
            self._pools[name] = pool
            reported_at = now - pool.load_age_s
            for known, load in zip(before.replicas, pool.replicas, strict=True):
                replica_id = load.replica_id
                if replica_id != known.replica_id or self._homes[replica_id].pool.pool != name:
                    return False  # others than before; or two pools name it, and now this one was heard last
                changed[replica_id] = Home(pool, load, reported_at)
        self._homes.update(changed)
        self._kept = [
            columns if changed.keys().isdisjoint(columns.candidates.places) else self._with_rows(columns, changed)
            for columns in self._kept
        ]
        return True

    def _made(self, asked: list[str]) -> Columns:
        homes = self._homes
        heard = tuple(replica_id for replica_id in asked if replica_id in homes)
        slots = np.array([homes[replica_id].pool.slot for replica_id in heard], np.int64)
        candidates = Candidates(
            asked=asked,
            replica_ids=heard,
            unheard=tuple(replica_id for replica_id in asked if replica_id not in homes),
            roll=Roll(heard),
            slots=slots,
            slots_at=int(slots.ctypes.data),
            places={replica_id: place for place, replica_id in enumerate(heard)},
        )
        columns = Columns(candidates, np.zeros((8, len(heard)), np.int64))
        return self._with_rows(columns, {replica_id: homes[replica_id] for replica_id in heard})

    def _with_rows(self, columns: Columns, changed: dict[str, Home]) -> Columns:
        """Returns the columns with what is new of those replicas that are among the candidates."""
        places, size = columns.candidates.places, self._block_tokens
        words = columns.words.copy()
        fractions = words.view(np.float64)
        for replica_id, (pool, load, reported_at) in changed.items():
            place = places.get(replica_id)
            if place is not None:  # one by one is faster than to make arrays of them
                words[0, place] = load.queued_prefill_tokens
                words[1, place] = load.running
                fractions[2, place] = reported_at - SETTLE_S
                words[3, place] = load.waiting
                words[4, place] = size * pool.free_blocks
                words[5, place] = size * pool.key_blocks
                fractions[6, place] = load.prefill_tokens_per_s
                fractions[7, place] = reported_at
        return Columns(columns.candidates, words)
