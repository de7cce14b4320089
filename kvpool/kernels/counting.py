"""The counters and histograms of this process's slot. Only the slot's process writes them, so plain accesses will do."""

from __future__ import annotations

from kvpool import layout
from kvpool.compiled import inner
from kvpool.kernels.atomics import get, highest_bit, put
from kvpool.kernels.context import RETRIES, SLOT, TRIES


def _counter(name: str) -> int:
    return 8 * layout.COUNTERS[name]


ALLOCATED_LOCAL = _counter("allocated_local_blocks")
ALLOCATED_FREE = _counter("allocated_free_blocks")
ALLOCATED_EVICT = _counter("allocated_evict_blocks")
ALLOCATIONS = _counter("allocations")
FAILURES_FULL = _counter("failures_full")
FAILURES_OWED = _counter("failures_owed")
REQUESTED = _counter("requested_blocks")
PEAK_REQUESTED = _counter("peak_requested_blocks")
USED_SUM = _counter("used_blocks_sum")
PEAK_USED = _counter("peak_used_blocks")
PEAK_HOLDERS = _counter("peak_holders")
EVICTIONS_IDLE = _counter("evictions_idle")
EVICTED_WHILE_HELD = _counter("evicted_while_held")
COW_COPIES = _counter("cow_copies")
DEDUPS = _counter("dedups")
HASH_COLLISIONS = _counter("hash_collisions")
UNINDEXED_CONTENDED = _counter("unindexed_contended")
UNINDEXED_FULL = _counter("unindexed_full")
RESTORED_BITS = _counter("restored_bits")
RECOUNTED = _counter("recounted_blocks")
LATE_INDEXED = _counter("late_indexed_blocks")
LIFETIME = 8 * layout.HISTOGRAMS["lifetime"]
IDLE_BEFORE_EVICT = 8 * layout.HISTOGRAMS["idle_before_evict"]
REUSE_GAP = 8 * layout.HISTOGRAMS["reuse_gap"]
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
