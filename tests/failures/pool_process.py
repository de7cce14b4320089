"""A process with a pool that it publishes, as a replica does, without a model: prompts are sealed and evicted at random.

    traffic thread -> Pool -> region -> PublisherThread -> Redis

Every public method is a command of the test. What fails in the traffic is told by `state`.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict
from typing import Any

from kvpool import Pool, Region
from kvpool.directory import Bounds, PoolLoad, ReplicaLoad, Space
from kvpool.directory.publisher import Publisher, PublisherSettings
from kvpool.directory.publisher_thread import PublisherThread
from kvpool.directory.redis_backend import RedisWriter
from kvpool.tidy_thread import TidyThread
from tests.failures.prompts import BLOCK_TOKENS, FINGERPRINT, GEOMETRY, KEYS, OWNER, PROMPTS, TOKENS

Answer = dict[str, Any]
_EVICTS = 0.15
_MOST_EVICTED = 8


class PoolProcess:
    """See above."""

    def __init__(self) -> None:
        self._running = threading.Event()
        self._at_rest = threading.Lock()  # held during a request
        self._stop = threading.Event()
        self._failure = ""
        self._count = 0

    def start(
        self,
        url: str,
        space: list[Any],
        path: str,
        how: str,
        pool: str,
        replica_ids: list[str],
        capacity_blocks: int,
        lease_s: float,
        log_entries: int,
        retention_s: float,
        per_s: float,
        seed: int,
    ) -> Answer:
        """Creates, adopts or attaches (`how`) the region at `path`, and publishes it as `pool`, for these replicas."""
        directory, _, name = path.rpartition("/")
        if how == "create":
            region = Region.create(
                directory, name, GEOMETRY, capacity_blocks, FINGERPRINT, random.SystemRandom(), owner=OWNER
            )
        elif how == "adopt":
            adopted = Region.adopt(path, geometry=GEOMETRY, fingerprint=FINGERPRINT, owner=OWNER)
            assert adopted is not None, f"somebody lives in {path}"
            region = adopted
        else:
            region = Region.attach(path, geometry=GEOMETRY, fingerprint=FINGERPRINT, owner=OWNER)
        self._region = region
        self._pool = Pool.create(region)
        self._tidy = TidyThread(self._pool, 0.2)
        self._rng = random.Random(seed)
        self._per_s = per_s
        bounds = Bounds(log_entries=log_entries, retention_s=retention_s)
        writer = RedisWriter(url, Space(*space), random.SystemRandom(), bounds=bounds)
        control = region.control()
        loads = tuple(ReplicaLoad(replica_id) for replica_id in replica_ids)
        publisher = Publisher(
            control,
            pool,
            region.incarnation,
            writer,
            load=lambda: PoolLoad(self._pool.unused(), loads),
            clock=time.monotonic,
            rng=random.SystemRandom(),
            settings=PublisherSettings(lease_s=lease_s, heartbeat_s=min(0.2, lease_s / 5), tail_keys=64),
            bounds=bounds,
            may_open=lambda: region.try_lead("publisher"),
        )
        self._publishing = PublisherThread(
            publisher, writer, control, on_failure=lambda error: region.resign("publisher")
        )
        self._traffic = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._running.set()
        self._traffic.start()
        return {}

    def state(self) -> Answer:
        """The publisher's counters, the requests so far, and what failed."""
        failure = self._failure or (repr(self._publishing.failure) if self._publishing.failure else "")
        return {
            "publisher": asdict(self._publishing.stats()),
            "publishes": self._publishing.alive,
            "count": self._count,
            "failure": failure,
        }

    def rest(self) -> Answer:
        """Ends the traffic until `go`; returns when nothing is in progress."""
        self._running.clear()
        with self._at_rest:
            return {}

    def go(self) -> Answer:
        """Goes on with the traffic."""
        self._running.set()
        return {}

    def leave(self) -> Answer:
        """Ends everything in the order in which a replica ends it; returns what is wrong with the pool, if anything is."""
        self._stop.set()
        self._running.set()
        self._traffic.join()
        violation = self._pool.check_integrity()
        self._publishing.close(goodbye=self._region.alone())
        self._tidy.close()
        self._pool.close()
        self._region.close()
        return {"violation": violation}

    def _run(self) -> None:
        try:
            while not self._stop.wait(1 / self._per_s):
                self._running.wait()
                with self._at_rest:
                    if self._running.is_set():
                        self._request()
        except Exception as error:
            self._failure = repr(error)

    def _request(self) -> None:
        self._count += 1
        number = self._rng.randrange(PROMPTS)
        keys, tokens = KEYS[number], TOKENS[number]
        with self._pool.table(f"request-{self._count}") as table:
            matched = self._pool.match(table, keys, tokens)
            if self._pool.allocate(table, len(keys) - matched):
                for position in range(matched, len(keys)):
                    ids = tokens[position * BLOCK_TOKENS : (position + 1) * BLOCK_TOKENS]
                    self._pool.seal(table, position, keys[position], ids)
        if self._rng.random() < _EVICTS:
            self._pool.evict(self._rng.randint(1, _MOST_EVICTED))
