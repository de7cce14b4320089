"""The child process of the pool benchmark: `python -m cluster.bench.pool_worker [CORE]` does what its stdin says.

One command a line, `{"do": NAME, ...}`, answered by one line: what the method of that name below returns, or
`{"error": WHY}` for what kvatlas refuses. Ends with its stdin. Alarms of the pool are not logged: a neighbour that was
killed is what is measured here.

Limits: one region at a time.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.bench import pool_requests, pool_startup, pool_tidy
from cluster.bench.python_pool import PythonPool
from kvpool import BlockTable, KvatlasError, Pool, PoolError, Region

Answer = dict[str, Any]


class Attached:
    """What this process has of the region under measurement. Every public method is a command."""

    def __init__(self) -> None:
        self._region: Region | None = None
        self._pool: Pool | None = None
        self._held: BlockTable | None = None

    def open(self, path: str) -> Answer:
        """Takes a slot of the region at `path`."""
        self._region = Region.attach(path)
        self._pool = Pool.create(self._region)
        return {}

    def close(self) -> Answer:
        """Leaves the region. Raises PoolError when it is not whole; nobody else may be changing it meanwhile."""
        region, pool = self._attached()
        self._region = self._pool = None
        violation = pool.check_integrity()
        pool.close()
        region.close()
        if violation:
            raise PoolError(f"the region is damaged: {violation}")
        return {}

    def pairs(self, start_ns: int, stop_ns: int) -> Answer:
        """Pairs in that time, and what they had to try again."""
        _, pool = self._attached()
        before = pool.stats()
        span = pool_requests.run(pool_requests.pool_pairs(pool), start_ns, stop_ns)
        after = pool.stats()
        tries, retries = after.cas_tries - before.cas_tries, after.cas_retries - before.cas_retries
        return {**asdict(span), "cas_tries": tries, "cas_retries": retries}

    def flock_pairs(self, start_ns: int, stop_ns: int) -> Answer:
        """The same pairs, every operation under one flock on the region's file."""
        region, pool = self._attached()
        lock_fd = os.open(region.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return asdict(pool_requests.run(pool_requests.locked_pairs(pool, lock_fd), start_ns, stop_ns))
        finally:
            os.close(lock_fd)

    def python_pairs(self, capacity_blocks: int, start_ns: int, stop_ns: int) -> Answer:
        """The same pairs on a pool in plain Python."""
        pool = PythonPool(capacity_blocks)
        return asdict(pool_requests.run(pool_requests.python_pairs(pool), start_ns, stop_ns))

    def match(self, blocks: int, seconds: float) -> Answer:
        """Median time of one match of `blocks` indexed blocks, over as many as fit into `seconds`, ten at least."""
        _, pool = self._attached()
        asked = pool_requests.prompt(pool, blocks)
        pool_requests.hold(pool, asked).close()
        taken_ns: list[int] = []
        stop = time.monotonic() + seconds
        while len(taken_ns) < 10 or time.monotonic() < stop:
            table = pool.table(pool_requests.REQUEST_ID)
            begin = time.perf_counter_ns()
            found = pool.match(table, asked.keys)
            taken_ns.append(time.perf_counter_ns() - begin)
            pool.release(table)
            if found != blocks:
                raise PoolError(f"{found} of {blocks} indexed blocks were found")
        pool.reset()
        return {"us": statistics.median(taken_ns) / 1e3, "matches": len(taken_ns)}

    def hold(self, indexed: int, mutable: int) -> Answer:
        """Holds so many blocks until it is killed."""
        _, pool = self._attached()
        self._held = pool_requests.hold(pool, pool_requests.prompt(pool, indexed), mutable)
        return {"blocks": len(self._held.blocks)}

    def reclaim(self) -> Answer:
        """Time to take back what dead neighbours held; blocks that somebody held before, and after."""
        _, pool = self._attached()
        before = pool.stats().used_blocks
        begin = time.perf_counter()
        pool.reclaim()
        seconds = time.perf_counter() - begin
        after = pool.stats().used_blocks
        pool.reset()  # what the dead one had indexed is still cached
        return {"ms": seconds * 1e3, "held_before": before, "held_after": after}

    def tidy(self, part: str, directory: str, name: str) -> Answer:
        """What one part of the tidy pass buys, on regions of its own."""
        return pool_tidy.show(part, Path(directory), name)

    def create(self, directory: str, name: str, blocks: int) -> Answer:
        """Makes the large region."""
        return pool_startup.create(Path(directory), name, blocks)

    def attach(self, path: str) -> Answer:
        """Joins the large region."""
        return pool_startup.attach(Path(path))

    def _attached(self) -> tuple[Region, Pool]:
        assert self._region is not None, "open comes first"
        assert self._pool is not None, "open comes first"
        return self._region, self._pool


def commands(attached: Attached) -> dict[str, Callable[..., Answer]]:
    """The commands by name."""
    return {name: getattr(attached, name) for name in vars(Attached) if not name.startswith("_")}


def main() -> None:
    """Answers until stdin ends."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    logging.disable(logging.CRITICAL)
    known = commands(Attached())
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        try:
            answer = known[command.pop("do")](**command)
        except KvatlasError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
