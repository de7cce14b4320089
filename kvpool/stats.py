"""What a pool tells about itself: one snapshot, taken under the pool's lock.

Every block is in exactly one of six conditions, so they sum to the capacity and no gauge made from them is ever
negative or above 100 %:

    free     nobody's                       mutable  being filled by a request
    local    in a process's local cache     sealed   complete, held, not matchable
    held     indexed, held by a request     cached   indexed, held by nobody: reusable, and evictable

Totals count from the moment the process took its slot.

Limits: totals are those of this process; blocks are those of the region.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvpool import words
from kvpool.blocks import Blocks


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One snapshot.

    `blocks`: number of blocks by condition {free, local, mutable, sealed, held, cached}, summing to
    `capacity_blocks`. `allocations`: blocks handed out, by source {local, free, evict}. `forced_releases`: by cause.
    `alloc_peak` and `alloc_mean`: blocks asked for in one allocation; `used_peak` and `used_mean`: blocks that
    requests held right after one (all blocks held, once each). `peak_holders`: most requests seen on one block.
    `evicted_while_held` must stay 0.
    """

    capacity_blocks: int
    blocks: Mapping[str, int]
    open_tables: int
    allocations: Mapping[str, int]
    allocation_failures: int
    alloc_peak: int
    alloc_mean: float
    used_peak: int
    used_mean: float
    evictions: int
    evicted_while_held: int
    cow_copies: int
    dedups: int
    hash_collisions: int
    second_releases: int
    forced_releases: Mapping[str, int]
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    peak_holders: int
    recovered_blocks: int

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.blocks["mutable"] + self.blocks["sealed"] + self.blocks["held"]


def count_blocks(blocks: Blocks) -> dict[str, int]:
    """Returns the number of blocks by condition, from the state and holder words."""
    control = blocks.control
    state = control.array("state") & np.uint64(words.STATE_MASK)
    number = np.bincount(state.astype(np.int64), minlength=256).tolist()
    held = int(np.count_nonzero((state == words.INDEXED) & (control.array("holders") != 0)))
    leaving = number[words.EVICTING] + number[words.FREEING]
    return {
        "free": number[words.FREE],
        "local": number[words.LOCAL],
        "mutable": number[words.MUTABLE],
        "sealed": number[words.SEALED],
        "held": held,
        "cached": number[words.INDEXED] - held + leaving,
    }


def snapshot(blocks: Blocks, open_tables: int, forced_releases: Mapping[str, int]) -> PoolStats:
    """Returns the stats of one process's pool. The caller holds the pool's lock."""
    counter = blocks.counter
    allocations = max(1, counter("allocations"))
    return PoolStats(
        capacity_blocks=len(blocks.refs),
        blocks=count_blocks(blocks),
        open_tables=open_tables,
        allocations={source: counter(f"allocated_{source}_blocks") for source in ("local", "free", "evict")},
        allocation_failures=counter("allocation_failures"),
        alloc_peak=counter("peak_requested_blocks"),
        alloc_mean=counter("requested_blocks") / allocations,
        used_peak=counter("peak_used_blocks"),
        used_mean=counter("used_blocks_sum") / allocations,
        evictions=counter("evictions"),
        evicted_while_held=counter("evicted_while_held"),
        cow_copies=counter("cow_copies"),
        dedups=counter("dedups"),
        hash_collisions=counter("hash_collisions"),
        second_releases=counter("second_releases"),
        forced_releases=dict(forced_releases),
        prefix_queried_tokens=counter("prefix_queried_tokens"),
        prefix_hit_tokens=counter("prefix_hit_tokens"),
        peak_holders=counter("peak_holders"),
        recovered_blocks=counter("recovered_blocks"),
    )
