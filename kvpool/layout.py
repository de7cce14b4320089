"""Where everything lies in a region, byte by byte.

    0        header, 4096 bytes: 64-bit words; each word that processes contend for has a line of its own
    4096     64 process slots of 2,048 bytes, and one record more: the counters of those who left
    137216   per-block arrays, bitmaps and index, each starting on a 64-byte line (`ARRAYS`)
    kv       the blocks' bytes, on a page (4 KiB; 2 MiB when there is at least 1 GiB of them), so block 0 never meets
             the header

Header words: `HEADER_WORDS`. Slot words: `SLOT_WORDS`, then the slot's own counters, `COUNTERS`, and histograms,
`HISTOGRAMS`. Numbers are in the host's byte order; a region never leaves its host.

Per block: state word and holder word (bit s: slot s holds it, while it is INDEXED), last use and birth (monotonic ns),
indexed children (low 32 bits; every change also adds one to the high 32, so that a recount notices), parent word
(depth << 32 | parent block + 1, 0 for a block without parent; depth 0 is the first block of a sequence), filled tokens,
label (the last 32 bytes of the request id that wrote it, so that a dump names it), key (16 bytes), magic and checksum
and history (guard mode), and the token ids (u32). Free and dirty bitmaps: bit b % 64 of word b // 64 is block b. Index:
64-bit entries `tag << 32 | block + 1`, at least four a block; a key's entry is among the `WINDOW` that start at the
place its first bytes name.

The digest covers every name, offset rule and number above; two programs that disagree on one of them refuse each
other's regions.

Limits: 64 slots; 2^31 blocks; the control part for 16-token blocks of a small model (30 layers, 3 KV heads of 64,
bfloat16) is about 0.1 % of a pool of 1.5 GB.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from kvpool import words
from kvpool.geometry import BlockGeometry

MAGIC: Final = int.from_bytes(b"KVATLAS\n", "little")
LAYOUT_VERSION: Final = 2
LINE_BYTES: Final = 64
PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20
HUGE_FROM_BYTES: Final = 1 << 30
MAX_BLOCKS: Final = 1 << 31
FINGERPRINT_BYTES: Final = 32

HEADER_BYTES: Final = 4096
SLOTS: Final = 64
SLOT_BYTES: Final = 2048
SLOT_WORD_COUNT: Final = SLOT_BYTES // 8
SLOTS_OFFSET: Final = HEADER_BYTES
RETIRED: Final = SLOTS
"""Number of the record behind the last slot: what slots counted before they were given back."""
ARRAYS_OFFSET: Final = SLOTS_OFFSET + (SLOTS + 1) * SLOT_BYTES
OWNER_BYTES: Final = 16

DTYPE_CODES: Final = {"float32": 1, "bfloat16": 2, "float16": 3}

HEADER_WORDS: Final[dict[str, int]] = {
    # Written once, before the region has a name.
    "magic": 0,
    "version": 1,
    "digest_low": 2,
    "digest_high": 3,
    "file_bytes": 4,
    "control_bytes": 5,
    "kv_offset": 6,
    "capacity_blocks": 7,
    "layers": 8,
    "kv_heads": 9,
    "head_dim": 10,
    "block_tokens": 11,
    "dtype": 12,
    "block_bytes": 13,
    "incarnation": 14,
    "index_entries": 15,
    "fingerprint": 16,  # four words
    "owner": 20,  # two words: tag of the cluster, see `Region.create`
    "check": 22,  # digest of all words above
    # Shared and changing, one line each.
    "slots_used": 32,  # bit s: a process has slot s
    "demand": 40,  # bit s: slot s waits in line for blocks
    "ticket_next": 48,
    "recount": 56,  # child counts may be too high
}
"""Word number of each header field. The lines from byte 1024 on hold no words: their bytes are lock ranges."""

LOCAL_CACHE_BLOCKS: Final = 4
SLOT_WORDS: Final[dict[str, int]] = {
    "pid": 0,
    "start_time": 1,  # clock ticks after boot, field 22 of /proc/PID/stat
    "generation": 2,  # how many lives the slot has had
    "heartbeat": 3,  # monotonic ns; late never means dead
    "floor_blocks": 4,  # the process may always hold so many
    "ticket": 5,  # place in the line; 0: does not wait
    "wanted_blocks": 6,  # what it waits for
    "used_blocks": 7,  # distinct blocks that requests of this process hold
    "open_tables": 8,
    "step": 9,  # the pause point it stands at (test builds)
    "pause_at": 10,  # the pause point it is to stop at (test builds)
    "local_cache": 12,  # four words: block + 1, 0 for empty
    "queued_prefill_tokens": 16,
    "running": 17,
    "waiting": 18,
    "prefill_mtokens_per_s": 19,  # thousandths of a token a second
    "replica_id": 24,  # 16 words: utf-8, padded with zeros
}
"""Word number of each slot field, relative to the slot. `pid` 0: nobody has the slot."""
REPLICA_ID_BYTES: Final = 128

COUNTERS_WORD: Final = 48
COUNTERS: Final[dict[str, int]] = {
    name: COUNTERS_WORD + position
    for position, name in enumerate(
        (
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
            "evictions_waiting",
            "evicted_while_held",
            "cow_copies",
            "dedups",
            "hash_collisions",
            "unindexed_contended",
            "unindexed_full",
            "second_releases",
            "forced_releases",
            "prefix_queried_tokens",
            "prefix_hit_tokens",
            "reclaimed_blocks",
            "reclaimed_slots",
            "restored_bits",
            "recounted_blocks",
            "late_indexed_blocks",
            "cas_tries",
            "cas_retries",
        )
    )
}
"""Word number of each counter, relative to the slot. They start at 0 when a process takes the slot."""

HISTOGRAM_BUCKETS: Final = 24
HISTOGRAM_UNIT_BITS: Final = 20
HISTOGRAMS_WORD: Final = 128
HISTOGRAMS: Final[dict[str, int]] = {
    name: HISTOGRAMS_WORD + position * HISTOGRAM_BUCKETS
    for position, name in enumerate(("lifetime", "idle_before_evict", "reuse_gap"))
}
"""First word of each histogram, relative to the slot.

A unit is 2^20 ns, about a millisecond. Bucket i counts durations of 2^i to 2^(i+1) units; the first one also everything
shorter, the last everything longer. `lifetime`: from sealing to eviction; `idle_before_evict`: from the last use to
eviction; `reuse_gap`: from the last use to the next one, of a block that nobody held between."""

INDEX_EMPTY: Final = 0
WINDOW: Final = 32
"""Index entries in which a key may be. Fixed, so entries never move and one that left needs no tombstone."""

ARRAYS: Final[tuple[tuple[str, int], ...]] = (
    ("state", 8),
    ("holders", 8),
    ("last_use", 8),
    ("born", 8),
    ("children", 8),
    ("parent", 8),
    ("filled", 8),
    ("magic", 8),
    ("checksum", 8),
    ("key", 16),
    ("label", 32),
    ("history", 32),
)
LABEL_BYTES: Final = 32
"""Per-block arrays in their order: name and bytes a block. After them: token ids, free bitmap, dirty bitmap, index."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets in the region of one geometry and capacity; `bitmap_words` and `index_entries` are counts."""

    capacity_blocks: int
    offsets: dict[str, int]
    bitmap_words: int
    index_entries: int
    control_bytes: int
    kv_offset: int
    file_bytes: int


def plan(geometry: BlockGeometry, capacity_blocks: int) -> Layout:
    """Returns the layout of a region of `capacity_blocks` blocks.

    Raises ValueError when the capacity is out of 1 .. 2^31.
    """
    if not 1 <= capacity_blocks <= MAX_BLOCKS:
        raise ValueError(f"a pool has 1 to {MAX_BLOCKS} blocks, got {capacity_blocks}")
    bitmap_words = -(-capacity_blocks // 64)
    index_entries = max(2 * WINDOW, 1 << (4 * capacity_blocks - 1).bit_length())
    sizes = [(name, width * capacity_blocks) for name, width in ARRAYS]
    sizes += [
        ("tokens", 4 * geometry.block_tokens * capacity_blocks),
        ("free", 8 * bitmap_words),
        ("dirty", 8 * bitmap_words),
        ("index", 8 * index_entries),
    ]
    offsets = {}
    end = ARRAYS_OFFSET
    for name, size in sizes:
        offsets[name] = end
        end = _align(end + size, LINE_BYTES)
    kv_bytes = geometry.block_bytes * capacity_blocks
    kv_offset = _align(end, HUGE_PAGE_BYTES if kv_bytes >= HUGE_FROM_BYTES else PAGE_BYTES)
    file_bytes = _align(kv_offset + kv_bytes, PAGE_BYTES)
    return Layout(capacity_blocks, offsets, bitmap_words, index_entries, end, kv_offset, file_bytes)


def _align(offset: int, step: int) -> int:
    return -(-offset // step) * step


def header_check(words_above: bytes) -> int:
    """Returns the value of the `check` word for the bytes of the header before it."""
    return int.from_bytes(hashlib.blake2b(words_above, digest_size=8).digest(), "little")


def digest() -> tuple[int, int]:
    """Returns the 128-bit digest of the rules in this file as two words (low, high)."""
    rules = (
        (LINE_BYTES, PAGE_BYTES, HUGE_PAGE_BYTES, HUGE_FROM_BYTES, FINGERPRINT_BYTES),
        (HEADER_BYTES, SLOTS, SLOT_BYTES, LOCAL_CACHE_BLOCKS, COUNTERS_WORD),
        sorted(DTYPE_CODES.items()),
        sorted(HEADER_WORDS.items()),
        sorted(SLOT_WORDS.items()),
        sorted(COUNTERS.items()),
        sorted(HISTOGRAMS.items()),
        (
            INDEX_EMPTY,
            WINDOW,
            HISTOGRAM_BUCKETS,
            HISTOGRAM_UNIT_BITS,
            RETIRED,
            REPLICA_ID_BYTES,
            LABEL_BYTES,
            OWNER_BYTES,
        ),
        ARRAYS,
        sorted(words.STATE_NAMES.items()),
        (words.OWNER_SHIFT, words.GENERATION_SHIFT, words.GENERATION_MASK),
        "tokens free dirty index",
    )
    data = hashlib.blake2b(repr(rules).encode(), digest_size=16).digest()
    return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")
