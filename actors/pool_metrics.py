"""Metrics of one process's side of its pool: what it took, evicted, shared and repaired, and how blocks live.

Levels (`kv_blocks`) are those of the whole region: where replicas share one, each of them tells the same, so take the maximum
over the replicas of a `pool`, not the sum. Totals are those of the replica's own process and add up.

The three distributions are counted inside the region, in buckets that double. They are exported as cumulative buckets
with the tag `le` (seconds), as Prometheus' `histogram_quantile` takes them.
"""

from __future__ import annotations

from itertools import accumulate

from actors.meters import Meters
from kvpool import PoolStats
from kvpool.stats import Histogram

_TOTALS = (
    ("cow_copies", "kv_copies", "Blocks copied because a request had to write into a shared one."),
    ("dedups", "kv_dedups", "Blocks given up for an equal one that another request had sealed first."),
    ("hash_collisions", "kv_hash_collisions", "Keys found with another parent or other tokens."),
    ("second_releases", "kv_second_releases", "Releases of a table that had been released; harmless, but a bug."),
    ("evicted_while_held", "kv_evicted_while_held", "Blocks evicted under a request. Must stay 0."),
    ("reclaimed_processes", "kv_reclaimed_processes", "Dead processes whose blocks this one gave back."),
    ("restored_bits", "kv_restored_free_bits", "Free blocks that had fallen off the list of free blocks."),
    ("recounted_blocks", "kv_recounted_blocks", "Blocks whose child count a death had left too high."),
    ("late_indexed", "kv_late_indexed_blocks", "Sealed blocks that were indexed at a later try."),
    ("cas_tries", "kv_cas", "Compare-and-swaps on blocks."),
    ("cas_retries", "kv_cas_retries", "Of these, the ones repeated because another process was faster."),
)
_TAGGED = (
    ("allocations", "source", "kv_allocated_blocks", "Blocks handed out, by source: local, free, evict."),
    ("allocation_failures", "reason", "kv_allocation_failures", "Refused allocations: full, or owed to others."),
    ("evictions", "class", "kv_evicted_blocks", "Blocks evicted: idle ones, or of requests put back into the line."),
    ("unindexed", "reason", "kv_unindexed_blocks", "Sealed blocks not indexed at once: contended, full."),
    ("forced_releases", "cause", "kv_forced_releases", "Requests whose blocks were taken back by force, by cause."),
)
_PEAKS = (
    ("alloc_peak", "kv_allocation_peak_blocks", "Most blocks asked for in one allocation."),
    ("alloc_mean", "kv_allocation_mean_blocks", "Mean blocks asked for in one allocation."),
    ("used_peak", "kv_used_peak_blocks", "Most blocks that requests of this replica held."),
    ("used_mean", "kv_used_mean_blocks", "Mean blocks that requests held, over allocations."),
    ("peak_holders", "kv_peak_holders", "Most requests of this replica that held one block."),
)
_DISTRIBUTIONS = (
    ("lifetime", "kv_block_lifetime_seconds", "From sealing to eviction."),
    ("idle_before_evict", "kv_block_idle_before_evict_seconds", "From the last use of a block to its eviction."),
    ("reuse_gap", "kv_block_reuse_gap_seconds", "Between two uses of a cached block."),
)


class PoolMetrics:
    """Reports `PoolStats` through `meters`."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        counter, gauge = meters.counter, meters.gauge
        self._blocks = gauge(
            "kv_blocks", "Blocks of the pool, by state; the states sum to its capacity.", "state", "pool"
        )
        self._reclaimed = counter("kv_reclaimed_blocks", "Blocks given back for dead processes, by cause.", "cause")
        self._totals = [(field, counter(name, text)) for field, name, text in _TOTALS]
        self._tagged = [(field, tag, counter(name, text, tag)) for field, tag, name, text in _TAGGED]
        self._peaks = [(field, gauge(name, text)) for field, name, text in _PEAKS]
        self._buckets = [
            (field, counter(f"{name}_bucket", text, "le"), counter(f"{name}_count", text))
            for field, name, text in _DISTRIBUTIONS
        ]

    def report(self, pool: str, stats: PoolStats) -> None:
        """Exports one snapshot of the pool named `pool`."""
        for state, count in stats.blocks.items():
            self._blocks.set(count, tags={"state": state, "pool": pool})
        for field, metric in self._peaks:
            metric.set(getattr(stats, field))
        raise_to = self._meters.raise_to
        raise_to(self._reclaimed, stats.reclaimed_blocks, cause="dead")
        for field, total in self._totals:
            raise_to(total, getattr(stats, field))
        for field, tag, total in self._tagged:
            for value, count in getattr(stats, field).items():
                raise_to(total, count, **{tag: value})
        for field, buckets, number in self._buckets:
            histogram: Histogram = getattr(stats, field)
            bounds = (*(f"{bound:g}" for bound in histogram.bounds_s()), "+Inf")
            for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
                raise_to(buckets, count, le=bound)
            raise_to(number, histogram.total)
