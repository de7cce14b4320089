"""A mirror full of prompts, and a router over it, as a benchmark finds them in a busy cluster.

Prompts are chains of random keys; each is held by some of the pools, to depths of many different lengths. The mirror is
filled by the messages that a follower would give it. Keys come from a seed, so two runs ask for the same.

Limits: heartbeats are made here, with leases longer than any run; nothing speaks to a directory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cluster.bench.router_plan import BATCH_BLOCKS, DEPTHS, HOLDERS, PROMPT_BLOCKS
from kvpool.directory import Batch, Heartbeat, LogEntry, ReplicaLoad, Snapshot, StoredSnapshot, Writer
from kvpool.directory.digest import changed, digest_of
from kvpool.keys import KEY_BYTES
from router.mirror import Mirror

LEASE_S: Final = 1e6
PROMPT_BYTES: Final = PROMPT_BLOCKS * KEY_BYTES


@dataclass(slots=True)
class _Spoken:
    writer: Writer
    seq: int = 0
    digest: int = 0
    load: ReplicaLoad | None = None


class Scene:
    """Pools `p0`, `p1`, ..., each of one replica `r0`, `r1`, ...; `mirror` follows them. `prompts` are packed keys."""

    def __init__(self, prompts: Sequence[bytes], pools: int, now: float, rng: random.Random) -> None:
        """Each of `prompts` is held by HOLDERS pools (by all if there are fewer), to DEPTHS different depths, by one whole."""
        self.mirror = Mirror(default_lease_s=LEASE_S)
        self.prompts = prompts
        self.replica_ids = [f"r{number}" for number in range(pools)]
        self._rng = rng
        self._position = 0
        self._now = now
        self._spoken = [_Spoken(Writer(f"p{number}", number + 1, 1)) for number in range(pools)]
        held: list[list[bytes]] = [[] for _ in range(pools)]
        self.pairs = 0
        """Keys held, each counted once for every pool."""
        for prompt in prompts:
            for pool, blocks in depths_of_a_prompt(pools, rng):
                held[pool].append(prompt[: blocks * KEY_BYTES])
                self.pairs += blocks
        for number, spoken in enumerate(self._spoken):
            self._load(spoken, b"".join(held[number]))
            held[number] = []
            self.beat(number)
        self.mirror.note_progress(now, 0)

    def fill(self, keys: bytes) -> None:
        """Adds these keys to the pools in turn, each to one."""
        share = -(-len(keys) // KEY_BYTES // len(self._spoken))
        for number in range(len(self._spoken)):
            for start in range(number * share, (number + 1) * share, BATCH_BLOCKS):
                end = min(start + BATCH_BLOCKS, (number + 1) * share)
                self.mirror.apply(self.change(number, b"", keys[start * KEY_BYTES : end * KEY_BYTES]), self._now)

    def change(self, pool: int, removed: bytes, added: bytes) -> LogEntry:
        """Returns the pool's next batch; it must be applied before the next one of that pool is made."""
        spoken = self._spoken[pool]
        spoken.seq += 1
        spoken.digest = changed(spoken.digest, removed, added)
        return self._entry(Batch(spoken.writer, spoken.seq, removed, added, spoken.digest))

    def beat(self, pool: int) -> None:
        """Applies a heartbeat with a load of the replica's that is new."""
        spoken, draw = self._spoken[pool], self._rng.randrange
        load = ReplicaLoad(self.replica_ids[pool], draw(4000), draw(16), draw(4), 5000.0 + draw(1000))
        message = Heartbeat(spoken.writer, spoken.seq, spoken.digest, LEASE_S, draw(1000), (load,))
        self.mirror.apply(self._entry(message), self._now)

    def _load(self, spoken: _Spoken, keys: bytes) -> None:
        spoken.digest = digest_of(keys)
        self.mirror.load(StoredSnapshot(Snapshot(spoken.writer, 0, keys, spoken.digest), self._position), self._now)

    def _entry(self, message: Batch | Heartbeat) -> LogEntry:
        self._position += 1
        return LogEntry(self._position, message)


def depths_of_a_prompt(pools: int, rng: random.Random) -> list[tuple[int, int]]:
    """Returns (pool, blocks) of those that hold a prompt: DEPTHS different depths if there are pools enough."""
    holders = rng.sample(range(pools), min(pools, HOLDERS))
    depths = [PROMPT_BLOCKS, *rng.sample(range(1, PROMPT_BLOCKS), DEPTHS - 1)]
    return [(pool, depths[place % DEPTHS]) for place, pool in enumerate(holders)]


def random_keys(count: int, rng: np.random.Generator) -> bytes:
    """Returns `count` different keys, packed."""
    return rng.bytes(count * KEY_BYTES)


def distinct_depths(depths: npt.NDArray[np.int32]) -> int:
    """How many different depths, 0 not counted, a look-up gave."""
    return len(np.unique(depths[depths > 0]))


class Silent:
    """Metrics of a router that nobody reads."""

    def decided(self, seconds: float) -> None: ...

    def routed(self, outcome: str) -> None: ...

    def looked_up(
        self, queried_tokens: int, predicted_tokens: int, measured_tokens: int, phantom_tokens: int
    ) -> None: ...

    def retried(self) -> None: ...

    def levels(self, bookings: int, state: str, lag_s: float, resyncs: int, gaps: int) -> None: ...
