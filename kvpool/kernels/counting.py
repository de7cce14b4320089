"""The counters and histograms of this process's slot. Only the slot's process writes them, so plain accesses will do."""

from __future__ import annotations

from kvpool import layout
from kvpool.compiled import inner
from kvpool.kernels.atomics import get, highest_bit, put
from kvpool.kernels.context import RETRIES, SLOT, TRIES

(
    ALLOCATED_LOCAL,
    ALLOCATED_FREE,
    ALLOCATED_EVICT,
    ALLOCATIONS,
    FAILURES_FULL,
    FAILURES_OWED,
    REQUESTED,
    PEAK_REQUESTED,
    USED_SUM,
    PEAK_USED,
    PEAK_HOLDERS,
    EVICTIONS_IDLE,
    EVICTED_WHILE_HELD,
    COW_COPIES,
    DEDUPS,
    HASH_COLLISIONS,
    UNINDEXED_CONTENDED,
    UNINDEXED_FULL,
    RESTORED_BITS,
    RECOUNTED,
    LATE_INDEXED,
) = (
    8 * layout.COUNTERS[name]
    for name in (
        "allocated_local_blocks",
        "allocated_free_blocks",
        "allocated_evict_blocks",
        "allocations",
        "failures_full",
        "failures_owed",
        "requested_blocks",
        "peak_requested_blocks",
        "used_blocks_sum",
        "peak_used_blocks",
        "peak_holders",
        "evictions_idle",
        "evicted_while_held",
        "cow_copies",
        "dedups",
        "hash_collisions",
        "unindexed_contended",
        "unindexed_full",
        "restored_bits",
        "recounted_blocks",
        "late_indexed_blocks",
    )
)
LIFETIME, IDLE_BEFORE_EVICT, REUSE_GAP = (
    8 * layout.HISTOGRAMS[name] for name in ("lifetime", "idle_before_evict", "reuse_gap")
)
_BUCKETS = layout.HISTOGRAM_BUCKETS
_UNIT_BITS = layout.HISTOGRAM_UNIT_BITS


@inner
def count(ctx: int, counter: int, amount: int) -> None:
    """Adds `amount` to a counter."""
    address = get(ctx + SLOT) + counter
    put(address, get(address) + amount)


@inner
def count_peak(ctx: int, counter: int, value: int) -> None:
    """Raises a counter to `value` if it is lower."""
    address = get(ctx + SLOT) + counter
    if value > get(address):
        put(address, value)


@inner
def tried(ctx: int, tries: int, retries: int) -> None:
    """Adds to the numbers of compare-and-swaps, and of those that another process made fail."""
    put(ctx + TRIES, get(ctx + TRIES) + tries)
    if retries != 0:
        put(ctx + RETRIES, get(ctx + RETRIES) + retries)


@inner
def bucket_of(duration_ns: int) -> int:
    """The bucket that counts this duration."""
    return min(_BUCKETS - 1, highest_bit(max(0, duration_ns) >> _UNIT_BITS | 1))


@inner
def observe(ctx: int, histogram: int, bucket: int, times: int) -> None:
    """Counts `times` durations in a bucket."""
    address = get(ctx + SLOT) + histogram + 8 * bucket
    put(address, get(address) + times)
