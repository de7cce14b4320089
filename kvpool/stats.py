"""What a pool tells about itself: one snapshot.

Every block is looked at once and is in exactly one of six conditions, so they sum to the capacity and no gauge made from
them is ever negative or above 100 %, whatever other processes do meanwhile:

    free     nobody's                       mutable  being filled by a request
    local    in a process's local cache     sealed   complete, held, not matchable
    held     indexed, held by a request     cached   indexed, held by nobody: reusable, and evictable

Totals count from the moment a process took its slot. `snapshot` tells those of one process; `region_totals` those of all
processes, dead and gone ones included.

Limits: blocks are those of the region, in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.control import Control
from kvpool.layout import COUNTERS, HISTOGRAM_BUCKETS, HISTOGRAM_UNIT_BITS, HISTOGRAMS, RETIRED, SLOT_WORD_COUNT, SLOTS
from kvpool.slot import word

_UNIT_S = 2**HISTOGRAM_UNIT_BITS / 1e9


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations. `counts[i]`: those up to `bounds_s()[i]` and above the bound before; the last has no bound."""

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    def bounds_s(self) -> tuple[float, ...]:
        """Returns the upper bound of each bucket but the last, in seconds."""
        return tuple(_UNIT_S * 2.0 ** (bucket + 1) for bucket in range(HISTOGRAM_BUCKETS - 1))


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One snapshot.

    `blocks`: number of blocks by condition {free, local, mutable, sealed, held, cached}, summing to
    `capacity_blocks`. `allocations`: blocks handed out, by source {local, free, evict}. `allocation_failures`: refused
    allocations, by reason {full, owed: others had a claim}. `evictions`: by class {idle, waiting: of requests that were put
    back into the line}. `reclaimed`: blocks given back by force, by cause {dead: of processes, and the causes of forced
    releases count requests}. `alloc_peak` and `alloc_mean`: blocks asked for in one allocation; `used_peak` and
    `used_mean`: blocks that requests held right after one (all blocks held, once each). `peak_holders`: most requests of one
    process seen on one block. `unindexed`: sealed blocks that could not be indexed at once {contended, full}.
    `evicted_while_held` must stay 0. `cas_tries`, `cas_retries`: compare-and-swaps, and those repeated.
    """

    capacity_blocks: int
    blocks: Mapping[str, int]
    open_tables: int
    allocations: Mapping[str, int]
    allocation_failures: Mapping[str, int]
    alloc_peak: int
    alloc_mean: float
    used_peak: int
    used_mean: float
    evictions: Mapping[str, int]
    evicted_while_held: int
    cow_copies: int
    dedups: int
    hash_collisions: int
    unindexed: Mapping[str, int]
    late_indexed: int
    second_releases: int
    forced_releases: Mapping[str, int]
    reclaimed_blocks: int
    reclaimed_processes: int
    restored_bits: int
    recounted_blocks: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    peak_holders: int
    cas_tries: int
    cas_retries: int
    lifetime: Histogram
    idle_before_evict: Histogram
    reuse_gap: Histogram

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.blocks["mutable"] + self.blocks["sealed"] + self.blocks["held"]


def snapshot(
    control: Control, slot: int, blocks: Mapping[str, int], open_tables: int, forced_releases: Mapping[str, int]
) -> PoolStats:
    """Returns the stats of the process in `slot`. `blocks`: by condition."""
    return _stats(control, (slot,), blocks, open_tables, forced_releases)


def region_totals(control: Control, blocks: Mapping[str, int]) -> PoolStats:
    """Returns the stats of all processes that use or ever used the region together; forced releases only as a number."""
    slots = (*range(SLOTS), RETIRED)
    tables = sum(word(control, slot, "open_tables") for slot in range(SLOTS))
    forced = sum(_counter(control, slot, "forced_releases") for slot in slots)
    return _stats(control, slots, blocks, tables, {"all": forced})


def _counter(control: Control, slot: int, name: str) -> int:
    value: int = control.slots[slot * SLOT_WORD_COUNT + COUNTERS[name]]
    return value


def _stats(
    control: Control,
    slots: tuple[int, ...],
    blocks: Mapping[str, int],
    open_tables: int,
    forced_releases: Mapping[str, int],
) -> PoolStats:
    def total(name: str) -> int:
        return sum(_counter(control, slot, name) for slot in slots)

    def peak(name: str) -> int:
        return max(_counter(control, slot, name) for slot in slots)

    def histogram(name: str) -> Histogram:
        first = HISTOGRAMS[name]
        return Histogram(
            tuple(
                sum(control.slots[slot * SLOT_WORD_COUNT + first + bucket] for slot in slots)
                for bucket in range(HISTOGRAM_BUCKETS)
            )
        )

    allocations = max(1, total("allocations"))
    return PoolStats(
        capacity_blocks=control.layout.capacity_blocks,
        blocks=blocks,
        open_tables=open_tables,
        allocations={source: total(f"allocated_{source}_blocks") for source in ("local", "free", "evict")},
        allocation_failures={reason: total(f"failures_{reason}") for reason in ("full", "owed")},
        alloc_peak=peak("peak_requested_blocks"),
        alloc_mean=total("requested_blocks") / allocations,
        used_peak=peak("peak_used_blocks"),
        used_mean=total("used_blocks_sum") / allocations,
        evictions={kind: total(f"evictions_{kind}") for kind in ("idle", "waiting")},
        evicted_while_held=total("evicted_while_held"),
        cow_copies=total("cow_copies"),
        dedups=total("dedups"),
        hash_collisions=total("hash_collisions"),
        unindexed={reason: total(f"unindexed_{reason}") for reason in ("contended", "full")},
        late_indexed=total("late_indexed_blocks"),
        second_releases=total("second_releases"),
        forced_releases=dict(forced_releases),
        reclaimed_blocks=total("reclaimed_blocks"),
        reclaimed_processes=total("reclaimed_slots"),
        restored_bits=total("restored_bits"),
        recounted_blocks=total("recounted_blocks"),
        prefix_queried_tokens=total("prefix_queried_tokens"),
        prefix_hit_tokens=total("prefix_hit_tokens"),
        peak_holders=peak("peak_holders"),
        cas_tries=total("cas_tries"),
        cas_retries=total("cas_retries"),
        lifetime=histogram("lifetime"),
        idle_before_evict=histogram("idle_before_evict"),
        reuse_gap=histogram("reuse_gap"),
    )
