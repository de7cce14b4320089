"""From a key to the block that has it: open addressing with linear probing, inside the region.

An entry is one 64-bit word, `tag << 32 | block + 1`: the key's bytes 0..7 say where probing starts, bytes 8..11 are
the tag. The full key is compared with the one stored at the block, so a tag that agrees by chance costs one
comparison. One word an entry means that inserting is a single store (later: a single compare-and-swap).

There are at least two entries a block and a block is in the index once, so at least half of the table never holds a
live entry. A removed entry leaves a tombstone, because probes for others may lead past it; when the next entry is
empty, it and all tombstones before it become empty instead. A table in which live entries and tombstones fill more
than three quarters is rebuilt in place from the block states, so probes stay short for ever and the table cannot fill
up.

Limits: one key, one block. The caller serialises all calls.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvpool import words
from kvpool.control import Control
from kvpool.layout import HEADER_WORDS, INDEX_EMPTY, INDEX_TOMBSTONE

NOT_FOUND: Final = -1
_BLOCK_MASK: Final = 0xFFFFFFFF
_TOMBSTONES: Final = HEADER_WORDS["index_tombstones"]


def entry_of(key: bytes, block: int) -> int:
    """Returns the index entry for (key, block)."""
    return int.from_bytes(key[8:12], "little") << 32 | (block + 1)


class PrefixIndex:
    """The index of one region, as one process sees it. All state is in the region, except the count of live entries."""

    __slots__ = ("_control", "_entries", "_limit", "_mask", "live")

    def __init__(self, control: Control) -> None:
        self._control = control
        self._entries = control.index
        self._mask = len(control.index) - 1
        self._limit = len(control.index) * 3 // 4
        self.live = int(np.count_nonzero((control.array("index") & np.uint64(_BLOCK_MASK)) % np.uint64(_BLOCK_MASK)))

    @property
    def tombstones(self) -> int:
        """Number of entries that are neither live nor empty."""
        count: int = self._control.header[_TOMBSTONES]
        return count

    def find(self, key: bytes) -> int:
        """Returns the block whose stored key is `key`, or NOT_FOUND. Says nothing about the block's state."""
        entries = self._entries
        mask = self._mask
        position = int.from_bytes(key[:8], "little") & mask
        tag = int.from_bytes(key[8:12], "little")
        while True:
            entry = entries[position]
            if entry == INDEX_EMPTY:
                return NOT_FOUND
            if entry >> 32 == tag and entry != INDEX_TOMBSTONE:
                block: int = (entry & _BLOCK_MASK) - 1
                if self._control.key(block) == key:
                    return block
            position = position + 1 & mask

    def insert(self, key: bytes, block: int) -> None:
        """Adds (key, block). The key must be written at the block and must not be in the index (AssertionError)."""
        assert self.find(key) == NOT_FOUND, f"key {key.hex()} is indexed already"
        if self.live + self.tombstones >= self._limit:
            self.rebuild()
        self._put(key, block)
        self.live += 1

    def _put(self, key: bytes, block: int) -> None:
        entries = self._entries
        position = int.from_bytes(key[:8], "little") & self._mask
        while entries[position] not in (INDEX_EMPTY, INDEX_TOMBSTONE):
            position = position + 1 & self._mask
        if entries[position] == INDEX_TOMBSTONE:
            self._control.header[_TOMBSTONES] -= 1
        entries[position] = entry_of(key, block)

    def remove(self, key: bytes, block: int) -> None:
        """Removes (key, block). Raises AssertionError when it is not there."""
        entries = self._entries
        mask = self._mask
        wanted = entry_of(key, block)
        position = int.from_bytes(key[:8], "little") & mask
        while (entry := entries[position]) != wanted:
            assert entry != INDEX_EMPTY, f"block {block} is not in the index under its key {key.hex()}"
            position = position + 1 & mask
        self.live -= 1
        if entries[position + 1 & mask] != INDEX_EMPTY:
            entries[position] = INDEX_TOMBSTONE
            self._control.header[_TOMBSTONES] += 1
            return
        entries[position] = INDEX_EMPTY
        position = position - 1 & mask
        while entries[position] == INDEX_TOMBSTONE:
            entries[position] = INDEX_EMPTY
            self._control.header[_TOMBSTONES] -= 1
            position = position - 1 & mask

    def rebuild(self) -> None:
        """Empties the table and inserts every INDEXED block anew."""
        control = self._control
        control.array("index")[:] = INDEX_EMPTY
        control.header[_TOMBSTONES] = 0
        states = control.array("state") & np.uint64(words.STATE_MASK)
        blocks: list[int] = np.flatnonzero(states == words.INDEXED).tolist()
        for block in blocks:
            self._put(control.key(block), block)
        self.live = len(blocks)
