"""Which cached block goes first, and how it goes.

Only idle indexed LEAVES may go: INDEXED, held by no slot, no indexed child. So the index stays prefix-closed, and a
prefix loses its tail first. Among leaves the one unused for the longest goes first; at equal times the deeper one.
When a leaf goes, its parent may become a leaf and is a candidate at once.

Candidates wait in a heap of (last use, -depth, block, generation), private to the process and lazy: a block is pushed
when it becomes an idle leaf, and looked at again only when popped. An entry whose block lives another life, was used
since, or is no idle leaf any more is dropped. The heap is rebuilt by one scan of all blocks when it runs empty
although idle blocks exist, or has grown beyond four times the capacity: so memory is bounded, and a full pool does
not scan per block.

Going: INDEXED -> EVICTING (by our slot), then look at the holder word: anyone there, and it is put back. Else
FREEING, the point of no return; out of the index; the parent's child count falls (after the un-indexing, so a death
in between leaves it too high, never too low); FREE, with its bit set and a new generation.

Limits: the caller serialises all calls; with a single mutating process nobody can object in between, but the order is
the same.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from kvpool.blocks import Blocks
from kvpool.index import PrefixIndex
from kvpool.words import EVICTING, FREEING, INDEXED, NO_SLOT, STATE_MASK, generation_of

NOTHING: Final = -1
_GROWTH: Final = 4
PARENT_MASK: Final = 0xFFFFFFFF
DEPTH_SHIFT: Final = 32


class Eviction:
    """The line of candidates and the act itself. `blocks` is set once, right after construction, by `connect`."""

    __slots__ = ("_blocks", "_heap", "_index", "_limit")

    def __init__(self, index: PrefixIndex, capacity_blocks: int) -> None:
        self._index = index
        self._heap: list[tuple[int, int, int, int]] = []
        self._limit = _GROWTH * capacity_blocks
        self._blocks: Blocks

    def connect(self, blocks: Blocks) -> None:
        """Names the blocks this works on; they in turn call `push`."""
        self._blocks = blocks

    def __len__(self) -> int:
        """Number of entries waiting, stale ones included."""
        return len(self._heap)

    def push(self, block: int) -> None:
        """`block` has become an idle leaf."""
        heapq.heappush(self._heap, self._entry(block))
        if len(self._heap) > self._limit:
            self._rebuild()

    def _entry(self, block: int) -> tuple[int, int, int, int]:
        control = self._blocks.control
        depth = control.parent[block] >> DEPTH_SHIFT
        return (control.last_use[block], -depth, block, generation_of(control.state[block]))

    def evict(self, count: int) -> int:
        """Frees up to `count` idle indexed leaves, oldest first; returns how many."""
        done = 0
        while done < count and (block := self._pop()) != NOTHING:
            done += self._evict_block(block)
        return done

    def _pop(self) -> int:
        """Returns the oldest idle leaf, off the heap, or NOTHING."""
        while self._blocks.idle:
            if not self._heap:
                self._rebuild()
                if not self._heap:
                    break
            entry = heapq.heappop(self._heap)
            block = entry[2]
            if self._is_idle_leaf(block) and entry == self._entry(block):
                return block
        return NOTHING

    def _is_idle_leaf(self, block: int) -> bool:
        control = self._blocks.control
        return (
            control.state[block] & STATE_MASK == INDEXED
            and control.holders[block] == 0
            and control.children[block] == 0
        )

    def _rebuild(self) -> None:
        control = self._blocks.control
        indexed = control.array("state") & np.uint64(STATE_MASK) == INDEXED
        leaves = np.flatnonzero(indexed & (control.array("holders") == 0) & (control.array("children") == 0))
        self._heap = [self._entry(block) for block in leaves.tolist()]
        heapq.heapify(self._heap)

    def _evict_block(self, block: int) -> bool:
        blocks = self._blocks
        control = blocks.control
        blocks.move(block, EVICTING, blocks.slot)
        if control.holders[block] or control.children[block]:
            blocks.move(block, INDEXED, NO_SLOT)
            return False
        blocks.move(block, FREEING, blocks.slot)
        if control.holders[block]:
            blocks.count("evicted_while_held")
        self._index.remove(control.key(block), block)
        blocks.idle -= 1
        parent = (control.parent[block] & PARENT_MASK) - 1
        if parent >= 0:
            control.children[parent] -= 1
            if self._is_idle_leaf(parent):
                self.push(parent)
        blocks.set_free(block)
        blocks.count("evictions")
        return True
