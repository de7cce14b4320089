"""What the kernels of one process work on: a private record of addresses and constants, and its fields' offsets.

The record is an array of 64-bit words, made once from a `Control`; an entry gets its address and reads fields as
`get(ctx + FIELD)`, so each constant below is a byte offset. Everything it points to that is not in the region is private
to the process too: how many requests hold each block (`REFS`), the line of eviction candidates (`HEAP`), scratch.

A table (`block_table.py`) is such a record as well: `TABLE_*` are its fields.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool import layout
from kvpool.control import Control

(
    HEADER,
    SLOTS,
    SLOT,  # our slot's record
    STATE,
    HOLDERS,
    LAST_USE,
    BORN,
    CHILDREN,
    PARENT,
    FILLED,
    KEY,
    LABEL,
    TOKENS,
    FREE_BITS,
    DIRTY_BITS,
    INDEX,
    REFS,  # int64 [capacity]: requests of this process that hold the block
    HEAP,  # int64 [capacity, 4]
    SCRATCH,  # int64 [2 * capacity]
    CLOCK_ROOM,  # two words for the clock to write to
    CAPACITY,
    BITMAP_WORDS,
    INDEX_MASK,
    BLOCK_TOKENS,
    SLOT_NUMBER,
    MINE,  # our slot where a state word has its owner
    BIT,  # our bit of a holder word
    HOME,  # bitmap word where our search for free blocks begins
    # The rest changes.
    REACH,  # how many words from there on have been found without free blocks
    LOCAL_COUNT,
    HELD,  # distinct blocks that requests of this process hold
    HEAP_COUNT,
    TRIES,  # compare-and-swaps
    SHUT,  # 0; CLOSING: nothing is handed out any more; CLOSED: the region may be gone
    RETRIES,  # those that another process made fail, and looks that had to be repeated
    _WORDS,
) = range(0, 8 * 36, 8)

(
    TABLE_COUNT,
    TABLE_SEALED,
    TABLE_UNINDEXED,  # of the sealed ones, how many are still to be indexed
    TABLE_ROOM,  # how many block numbers the record has room for
    TABLE_LABEL,
) = range(0, 8 * 5, 8)
TABLE_BLOCKS: Final = TABLE_LABEL + layout.LABEL_BYTES
"""Byte offset of a table's block numbers, one int64 each."""

CLOSING: Final = 1
CLOSED: Final = 2

_HOMES: Final = tuple(int(f"{slot:06b}"[::-1], 2) for slot in range(layout.SLOTS))
"""Where slots begin to look for free blocks, in 64ths of the pool: each halves the widest gap left."""


_ARRAYS: Final = {
    STATE: "state",
    HOLDERS: "holders",
    LAST_USE: "last_use",
    BORN: "born",
    CHILDREN: "children",
    PARENT: "parent",
    FILLED: "filled",
    KEY: "key",
    LABEL: "label",
    TOKENS: "tokens",
    FREE_BITS: "free",
    DIRTY_BITS: "dirty",
    INDEX: "index",
}
"""Which of the layout's arrays each of these fields points to."""


class Context:
    """The record of one process; `address` is what entries take. Keeps its private arrays alive, not the mapping."""

    __slots__ = ("_arrays", "_words", "address", "refs", "scratch")

    def __init__(self, control: Control, slot: int) -> None:
        """`control` must stay unreleased for as long as entries are called with this."""
        plan = control.layout
        capacity = plan.capacity_blocks
        self.refs = np.zeros(capacity, np.int64)
        self.scratch = np.zeros(2 * capacity, np.int64)
        heap = np.zeros(4 * capacity, np.int64)
        clock_room = np.zeros(2, np.int64)
        words: npt.NDArray[np.int64] = np.zeros(_WORDS // 8, np.int64)
        base = control.address
        values = {
            HEADER: base,
            SLOTS: base + layout.SLOTS_OFFSET,
            SLOT: base + layout.SLOTS_OFFSET + slot * layout.SLOT_BYTES,
            REFS: self.refs.ctypes.data,
            HEAP: heap.ctypes.data,
            SCRATCH: self.scratch.ctypes.data,
            CLOCK_ROOM: clock_room.ctypes.data,
            CAPACITY: capacity,
            BITMAP_WORDS: plan.bitmap_words,
            INDEX_MASK: plan.index_entries - 1,
            BLOCK_TOKENS: control.block_tokens,
            SLOT_NUMBER: slot,
            MINE: slot + 1 << 8,
            BIT: int(np.uint64(1 << slot).astype(np.int64)),
            HOME: plan.bitmap_words * _HOMES[slot] >> 6,
        }
        values |= {offset: base + plan.offsets[name] for offset, name in _ARRAYS.items()}
        for offset, value in values.items():
            words[offset // 8] = value
        self._words = words
        self._arrays = (heap, self.refs, self.scratch, clock_room)
        self.address: int = words.ctypes.data

    def shut(self, how: int) -> None:
        """Tells the kernels that the pool is CLOSING or CLOSED. It stays as closed as it was."""
        self._words[SHUT // 8] = max(how, int(self._words[SHUT // 8]))

    @property
    def held(self) -> int:
        """Distinct blocks that requests of this process hold."""
        return int(self._words[HELD // 8])

    @property
    def local(self) -> int:
        """Blocks in this process's local cache."""
        return int(self._words[LOCAL_COUNT // 8])

    @property
    def compare_and_swaps(self) -> tuple[int, int]:
        """How many there were, and how many had to be tried again."""
        return int(self._words[TRIES // 8]), int(self._words[RETRIES // 8])
