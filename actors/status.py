"""What a replica says about itself, for `kvatlas status`, /health/ready and the debug endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One snapshot. Block counts come from one pool snapshot and sum to `capacity_blocks`.

    `prefix_queried_tokens` and `prefix_hit_tokens` are totals since the replica started, counted once per request.
    `held_blocks` is the number of blocks that some request holds now. `integrity` is the empty string when the pool's
    invariants hold, else the first violation in words. `stalled_s` is 0.0 unless the step thread has made no progress
    while it had work. `load_s` and `load_bytes` are the seconds of each phase of the start, and the bytes of those that
    moved some. `fingerprint` (hexadecimal), `kv_dtype` and `block_tokens` are what the keys of its blocks are rooted in.
    `pool` is the pool's name in the directory, `scope` who shares it; `adopted` whether dead processes left it with what
    they had cached.
    `publisher` tells how the pool's publication in the directory does (`PublisherStats` as a mapping); empty where there is
    no directory.
    """

    replica_id: str
    pid: int
    model: str
    mode: str
    fingerprint: str
    kv_dtype: str
    block_tokens: int
    capacity_blocks: int
    blocks: dict[str, int]
    held_blocks: int
    running: int
    waiting: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    max_model_len: int
    asyncio_tasks: int
    integrity: str
    stalled_s: float
    load_s: dict[str, float]
    load_bytes: dict[str, int]
    publisher: dict[str, Any]
    pool: str = ""
    scope: str = "replica"
    adopted: bool = False
