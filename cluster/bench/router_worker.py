"""The child process of the router benchmark that has a pool: `python -m cluster.bench.router_worker [CORE]`.

It is told what to do as the pool benchmark's child is (`pool_worker.py`). It publishes a small pool as a replica does, and seals
blocks at a steady pace, noting when. The directory's address, which may have a password in it, comes over its stdin.

Limits: one region at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from actors.publication import Publication
from kvpool import BlockGeometry, KvatlasError, Pool, PoolError, Region, layout
from kvpool.directory import PoolLoad, ReplicaLoad, Space
from kvpool.directory.redis_backend import RedisWriter

Answer = dict[str, Any]

GEOMETRY: Final = BlockGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
REPLICA_ID: Final = "sealer"
READY_S: Final = 10.0


class Published:
    """A pool of this process that is in the directory. Every public method is a command."""

    def __init__(self) -> None:
        self._parts = contextlib.ExitStack()
        self._pool: Pool | None = None

    def publish(self, url: str, cluster_id: str, fingerprint: str, directory: str, name: str, blocks: int) -> Answer:
        """Makes the region `name` of so many blocks in `directory`, and publishes it; returns when the directory has it."""
        rng = random.SystemRandom()
        region = Region.create(directory, name, GEOMETRY, blocks, bytes(layout.FINGERPRINT_BYTES), rng)
        self._parts.callback(region.close)
        pool = self._pool = Pool.create(region)
        self._parts.callback(pool.close)
        space = Space(cluster_id, fingerprint, GEOMETRY.block_tokens)
        load = PoolLoad(blocks, (ReplicaLoad(REPLICA_ID),))
        writer = RedisWriter(url, space, rng)
        publication = Publication(region, name, writer, load=lambda: load, lease_s=3.0, clock=time.monotonic, rng=rng)
        self._parts.callback(publication.close)
        deadline = time.monotonic() + READY_S
        while publication.report()["state"] != "open":
            if time.monotonic() > deadline:
                raise PoolError(f"the directory did not take the pool within {READY_S:g} s")
            time.sleep(0.005)
        return {}

    def seal(self, start_ns: int, stop_ns: int, per_s: float, blocks: int) -> Answer:
        """Seals prompts of `blocks` blocks, `per_s` of them a second; returns the last key of each, and when it was sealed."""
        assert self._pool is not None, "publish comes first"
        pool, size = self._pool, GEOMETRY.block_tokens
        sealed: list[tuple[str, int]] = []
        token_ids = list(range(size))
        due_ns = start_ns
        while due_ns < stop_ns:
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            keys = [secrets.token_bytes(16) for _ in range(blocks)]
            with pool.table("bench") as table:
                if not pool.allocate(table, blocks):
                    raise PoolError(f"a pool of {pool.capacity_blocks} blocks did not give {blocks} of them")
                for position, key in enumerate(keys):
                    at_ns = time.monotonic_ns()
                    pool.seal(table, position, key, token_ids)
            sealed.append((keys[-1].hex(), at_ns))
            due_ns += int(1e9 / per_s)
        return {"sealed": sealed}

    def close(self) -> Answer:
        """Leaves the directory and closes the region."""
        self._parts.close()
        return {}


def commands(published: Published) -> dict[str, Callable[..., Answer]]:
    """The commands by name."""
    return {name: getattr(published, name) for name in vars(Published) if not name.startswith("_")}


def main() -> None:
    """Answers until stdin ends."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    logging.disable(logging.CRITICAL)
    published = Published()
    known = commands(published)
    try:
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            try:
                answer = known[command.pop("do")](**command)
            except KvatlasError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        published.close()


if __name__ == "__main__":
    main()
