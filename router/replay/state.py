"""The simulated fleet as arrays: what `kernel.py` works on.

One row for each replica, with its pool; requests and their blocks in flat arrays, laid out as in the trace. Words of blocks
look like those of a region (`kvpool/words.py`), so that the publisher of the product can look at them (`pool_words.py`).

Memory: about 70 bytes for each block that a pool may have, of which only those that were ever used are touched; 4 bytes for
each node of the trace and replica, likewise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.replay.errors import ReplayError
from router.replay.trace import Trace

Ints = npt.NDArray[np.int64]
SmallInts = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

UNBOUNDED = 1 << 40
"""Blocks of a pool that keeps everything."""

ADMITTED, FIRST_TOKEN, FINISHED = range(3)
"""What an event says: of a request that was admitted with `value` cached tokens, whose prompt is computed, that is done."""


class Events(NamedTuple):
    """What happened, in no order over replicas; the first `kernel.advance(...)` entries count."""

    time: Floats
    kind: Ints
    request: Ints
    value: Ints


class Requests(NamedTuple):
    """From the trace, and what the fleet knows of each request. `slots` is laid out as `nodes`."""

    block_tokens: int
    input_tokens: Ints
    output_tokens: Ints
    first: Ints
    nodes: SmallInts
    slots: SmallInts
    predicted: Ints  # cached tokens that the router expects
    computed: Ints  # prompt tokens that are in blocks
    sealed: Ints  # full blocks that are in the index
    last_step: Ints  # the replica's decode step in which it is done


class Replicas(NamedTuple):
    """Queues and steps. Times are seconds; `step_end` is infinite while a replica is idle."""

    step_end: Floats
    step_began: Floats
    waiting: SmallInts  # [replicas, requests], from `waiting_from` to `waiting_to`
    waiting_from: Ints
    waiting_to: Ints
    prefilling: SmallInts  # [replicas, max_running], oldest first
    chunk: Ints  # [replicas, max_running]: tokens of each in the present step
    prefilling_count: Ints
    decoding: SmallInts  # [replicas, max_running]
    decoding_count: Ints
    context: Ints  # tokens cached for those that decode
    decode_steps: Ints
    next_done: Ints  # the first decode step in which somebody is done
    look: Ints  # 1: something changed since the waiting were looked at
    owed: Ints  # prompt tokens yet to be computed, of those waiting less what was predicted
    computed: Ints  # prompt tokens computed so far
    rate_tokens: Floats  # fading sums, as the engine measures its rate
    rate_seconds: Floats
    rate_at: Floats


class Pools(NamedTuple):
    """Blocks that have keys have a slot each; all others (tails of prompts, answers) are only counted."""

    state: Words  # [replicas, slots]
    parent: Words
    dirty: Words  # [replicas, slots / 64]
    any_dirty: Ints
    holders: SmallInts
    children: SmallInts
    last_use: Floats
    node_of: SmallInts
    slot_of: SmallInts  # [replicas, nodes]: slot + 1, 0 where there is none
    spare: SmallInts  # [replicas, slots]: slots that were given back
    spare_count: Ints
    used_slots: Ints  # slots from here on were never used
    room: Ints  # blocks that hold nothing
    idle: Ints  # blocks in the index that nobody holds
    evicted: Ints
    capacity: int


class Fleet(NamedTuple):
    """All of it."""

    requests: Requests
    replicas: Replicas
    pools: Pools


def made(trace: Trace, replicas: int, pool_blocks: int, max_running: int) -> Fleet:
    """Returns an idle fleet with empty pools of `pool_blocks` each (`UNBOUNDED`: they keep everything). Raises ReplayError."""
    if replicas < 1 or pool_blocks < 1:
        raise ReplayError(f"a replay has at least one replica and one block a pool, got {replicas} and {pool_blocks}")
    count = len(trace)
    slots = max(1, min(pool_blocks, trace.node_count))

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    def small(*shape: int) -> SmallInts:
        return np.zeros(shape, dtype=np.int32)

    def words(*shape: int) -> Words:
        return np.zeros(shape, dtype=np.uint64)

    def floats(*shape: int) -> Floats:
        return np.zeros(shape, dtype=np.float64)

    requests = Requests(
        trace.block_tokens,
        trace.input_tokens,
        trace.output_tokens,
        trace.first,
        trace.nodes,
        small(len(trace.nodes)),
        *(ints(count) for _ in range(4)),
    )
    running = (replicas, max_running)
    lines = Replicas(
        np.full(replicas, np.inf),
        floats(replicas),
        small(replicas, count),
        ints(replicas),
        ints(replicas),
        small(*running),
        ints(*running),
        ints(replicas),
        small(*running),
        *(ints(replicas), ints(replicas), ints(replicas), ints(replicas), ints(replicas), ints(replicas)),
        ints(replicas),
        *(floats(replicas), floats(replicas), floats(replicas)),
    )
    pools = Pools(
        words(replicas, slots),
        words(replicas, slots),
        words(replicas, -(-slots // 64)),
        ints(replicas),
        small(replicas, slots),
        small(replicas, slots),
        floats(replicas, slots),
        small(replicas, slots),
        small(replicas, trace.node_count),
        small(replicas, slots),
        ints(replicas),
        ints(replicas),
        np.full(replicas, pool_blocks, dtype=np.int64),
        ints(replicas),
        ints(replicas),
        pool_blocks,
    )
    return Fleet(requests, lines, pools)


def events_for(trace: Trace) -> Events:
    """Returns room for all events of a trace: three a request."""
    count = 3 * len(trace) + 3
    return Events(np.zeros(count), *(np.zeros(count, dtype=np.int64) for _ in range(3)))
