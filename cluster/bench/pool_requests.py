"""What the pool benchmark does to pools, as requests would: pairs, and chains of full blocks.

A pair is a request that finds nothing of its prompt: a table, 16 blocks, everything back. Pairs come in batches, so that
reading the clock and calling costs next to nothing of each.

Limits: one thread; the pool must have room for what is asked, else `Refused`.
"""

from __future__ import annotations

import fcntl
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.bench.pool_plan import PAIR_BLOCKS
from cluster.bench.python_pool import PythonPool
from kvpool import BlockTable, KeyRoot, KeySpace, KvatlasError, Pool

BATCH_PAIRS: Final = 64
REQUEST_ID: Final = "bench"

Batch = Callable[[], None]
"""Does BATCH_PAIRS pairs."""


class Refused(KvatlasError):
    """A pool had no room for what the benchmark asked of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Pairs done by one process, and when (monotonic ns): from its first one's begin to its last one's end."""

    pairs: int
    first_ns: int
    last_ns: int


def pool_pairs(pool: Pool) -> Batch:
    """Pairs through the pool's public API."""

    def batch() -> None:
        for _ in range(BATCH_PAIRS):
            table = pool.table(REQUEST_ID)
            if not pool.allocate(table, PAIR_BLOCKS):
                raise Refused(f"a pool of {pool.capacity_blocks} blocks did not give {PAIR_BLOCKS} of them")
            pool.release(table)

    return batch


def locked_pairs(pool: Pool, lock_fd: int) -> Batch:
    """The same pairs where each operation that changes the pool is done under one exclusive flock of `lock_fd`'s file."""

    def batch() -> None:
        flock, exclusive, unlocked = fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_UN
        for _ in range(BATCH_PAIRS):
            table = pool.table(REQUEST_ID)
            flock(lock_fd, exclusive)
            given = pool.allocate(table, PAIR_BLOCKS)
            flock(lock_fd, unlocked)
            if not given:
                raise Refused(f"a pool of {pool.capacity_blocks} blocks did not give {PAIR_BLOCKS} of them")
            flock(lock_fd, exclusive)
            pool.release(table)
            flock(lock_fd, unlocked)

    return batch


def python_pairs(pool: PythonPool) -> Batch:
    """The same pairs on the pool in plain Python."""

    def batch() -> None:
        for _ in range(BATCH_PAIRS):
            if pool.allocate(REQUEST_ID, PAIR_BLOCKS) is None:
                raise Refused(f"a pool of {pool.capacity_blocks} blocks did not give {PAIR_BLOCKS} of them")
            pool.free(REQUEST_ID)

    return batch


def run(batch: Batch, start_ns: int, stop_ns: int, clock: Callable[[], int] = time.monotonic_ns) -> Span:
    """Repeats `batch` from `start_ns` (or now, when that has passed) until `stop_ns`; at least once."""
    while clock() < start_ns:  # spun: whoever sleeps wakes up late
        pass
    pairs, first_ns = 0, clock()
    while True:
        batch()
        pairs += BATCH_PAIRS
        now_ns = clock()
        if now_ns >= stop_ns:
            return Span(pairs, first_ns, now_ns)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of full blocks that no other has: token ids and keys."""

    token_ids: list[int]
    keys: list[bytes]


def prompt(pool: Pool, blocks: int) -> Prompt:
    """A prompt of `blocks` full blocks, under a secret of its own."""
    size = pool.geometry.block_tokens
    space = KeySpace(secrets.token_bytes(32))
    token_ids = list(range(blocks * size))
    root = space.root(KeyRoot("bench", size, pool.geometry.dtype))
    return Prompt(token_ids, space.block_keys(root, token_ids, size))


def hold(pool: Pool, sealed: Prompt, more_blocks: int = 0) -> BlockTable:
    """A table that holds the blocks of `sealed`, all of them indexed, and `more_blocks` mutable ones behind them."""
    table = pool.table(REQUEST_ID)
    blocks = len(sealed.keys) + more_blocks
    if not pool.allocate(table, blocks):
        raise Refused(f"a pool of {pool.capacity_blocks} blocks did not give {blocks} of them")
    size = pool.geometry.block_tokens
    for position, key in enumerate(sealed.keys):
        pool.seal(table, position, key, sealed.token_ids[position * size : (position + 1) * size])
    return table


def room(pool: Pool) -> int:
    """How many blocks the pool really gives out at this moment, tried out; what is cached in it goes."""
    with pool.table(REQUEST_ID) as table:
        step = pool.capacity_blocks
        while step:
            if not pool.allocate(table, step):
                step //= 2
        return len(table.blocks)
