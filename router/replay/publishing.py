"""The publishers of a replay: one of the product for each simulated pool, stepped when it would have something to say.

A publisher of the product looks at its pool every few milliseconds. Here somebody else says when (`step`), and it looks then
if its pool changed, or if a heartbeat may be due: every 50 ms while its replica works, every 200 ms while it is idle. Nothing
sets words without their dirty bit, so there are no scans of all words but the first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

import numpy as np

from kvpool.control import Control
from kvpool.directory.backend import Bounds
from kvpool.directory.messages import MAX_NUMBER, PoolLoad, ReplicaLoad
from kvpool.directory.publisher import Publisher, PublisherSettings
from router.replay.delayed_directory import DelayedDirectory
from router.replay.pool_words import PoolWords
from router.replay.state import Fleet
from router.replay.trace import Trace

BEAT_S: Final = 0.05
"""Loads are told so often, as far as they change."""
_ENOUGH_RATE_TOKENS: Final = 1024.0
_RATE_HALF_LIFE_S: Final = 10.0
_NEVER: Final = 1 << 50
_SLACK_S: Final = 1e-6  # steps of BEAT_S are not exact in binary


class Publishing:
    """Publishers of all pools of `fleet`, into `directory`. `names`: pool and replica, of each."""

    def __init__(
        self,
        fleet: Fleet,
        trace: Trace,
        names: Sequence[tuple[str, str]],
        directory: DelayedDirectory,
        clock: Callable[[], float],
        lease_s: float,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._settings = PublisherSettings(
            full_scan_s=math.inf,
            lease_s=lease_s,
            load_s=BEAT_S - _SLACK_S,
            snapshot_s=math.inf,
            tail_keys=_NEVER,
        )
        self._publishers = [
            Publisher(
                cast(Control, PoolWords(fleet.pools, number, trace.keys)),  # what a publisher looks at, and no more
                pool,
                rng.getrandbits(63),
                directory,
                load=partial(self._load, number, replica_id),
                clock=clock,
                rng=rng,
                settings=self._settings,
                bounds=Bounds(log_entries=_NEVER),
            )
            for number, (pool, replica_id) in enumerate(names)
        ]
        self._due_at = np.zeros(len(self._publishers))

    def step(self) -> None:
        """Lets those publish that may have something to say now."""
        now = self._clock()
        dirty = self._fleet.pools.any_dirty
        due = (dirty != 0) | (self._due_at <= now)
        numbers = np.flatnonzero(due)
        if not len(numbers):
            return
        dirty[numbers] = 0
        for number in numbers.tolist():
            self._publishers[number].step()
        idle = self._fleet.replicas.step_end[numbers] == np.inf
        waits_s = np.where(idle, self._settings.heartbeat_s, BEAT_S) - _SLACK_S
        due_at = self._due_at[numbers]
        self._due_at[numbers] = np.where(due_at <= now, now + waits_s, np.minimum(due_at, now + waits_s))

    def _load(self, number: int, replica_id: str) -> PoolLoad:
        """What the replica's heartbeat says."""
        replicas, pools = self._fleet.replicas, self._fleet.pools
        waiting = int(replicas.waiting_to[number] - replicas.waiting_from[number])
        running = int(replicas.prefilling_count[number] + replicas.decoding_count[number])
        load = ReplicaLoad(replica_id, int(replicas.owed[number]), running, waiting, self._rate(number))
        return PoolLoad(min(MAX_NUMBER, int(pools.room[number])), (load,))

    def _rate(self, number: int) -> float:
        """Prompt tokens a second as the replica measures them, 0 while there is too little evidence (as in the engine)."""
        replicas = self._fleet.replicas
        tokens, seconds = float(replicas.rate_tokens[number]), float(replicas.rate_seconds[number])
        age_s = max(0.0, self._clock() - float(replicas.rate_at[number]))
        is_enough = tokens * 0.5 ** (age_s / _RATE_HALF_LIFE_S) >= _ENOUGH_RATE_TOKENS
        # Steps may be shorter than what a clock tells apart.
        return tokens / seconds if is_enough and seconds > 0 else 0.0
