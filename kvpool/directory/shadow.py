"""What a pool should show to others: its indexed keys, followed by looking at the region's words.

The shadow keeps, for each block, the state word it last dealt with, and the published set: key, life (generation) and
parent of every block that is listed. `scan` looks at blocks whose dirty bit was set (`dirty.py`), or at all whose word
differs, and returns the difference as keys to remove and to add.

Withdrawing. A block whose life ended, or that is past EVICTING, leaves the set, and whatever was published below it leaves
first. (The pool evicts leaves only, so those are gone too; the scan may just not have come to them.) EVICTING itself may
still be taken back: nothing is decided.

Publishing. An INDEXED block is added after its parent, which is looked at in turn if it is not published in its present
life. The reads need no lock, because they are checked: the words of the chain are read from the child up to the first
published ancestor, and then the child's word again. If the child is INDEXED in the same life before and after, its
ancestors were INDEXED all the time between (a parent with an indexed child cannot be evicted), so what was read there was
right. Otherwise the block waits for the next scan.

So the set is prefix-closed after every single step, and its insertion order has parents before children.

Limits: memory is bounded by the capacity, about 400 bytes a published block. A scan stops after `limit` changes and goes
on with the rest next time. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpool.control import Control
from kvpool.directory import dirty
from kvpool.eviction import DEPTH_SHIFT, PARENT_MASK
from kvpool.words import EVICTING, GENERATION_SHIFT, INDEXED, STATE_MASK

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys that left (children before parents; apply them first), and keys that came (parents before children)."""

    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)


@dataclass(frozen=True, slots=True)
class _Listed:
    key: bytes
    life: int
    parent: int


class Shadow:
    """Follows the region behind `control`, whose dirty bits it consumes."""

    def __init__(self, control: Control) -> None:
        blocks = control.layout.capacity_blocks
        self._control = control
        self._seen = np.zeros(blocks, dtype=np.uint64)  # 0 is no state: every block counts as changed
        self._room = np.empty(blocks, dtype=np.int64)
        self._listed: dict[int, _Listed] = {}
        self._children: dict[int, set[int]] = {}
        self._block_of: dict[bytes, int] = {}
        self._pending: set[int] = set()
        self._removed: dict[bytes, None] = {}
        self._added: dict[bytes, None] = {}

    def __len__(self) -> int:
        """Number of published keys."""
        return len(self._block_of)

    @property
    def pending(self) -> int:
        """Number of blocks that wait to be looked at."""
        return len(self._pending)

    def packed(self) -> bytes:
        """Returns all published keys, 16 bytes each, parents before children."""
        return b"".join(self._block_of)

    def scan(self, everything: bool, limit: int) -> Changes:
        """Looks at what changed (`everything`: compares all words), up to about `limit` changes; returns them."""
        pending = self._pending
        pending.update(dirty.take(self._control.array("dirty"), self._room))
        if everything:
            pending.update(np.flatnonzero(self._control.array("state") != self._seen).tolist())
        again = []
        while pending and len(self._added) + len(self._removed) < limit:
            block = pending.pop()
            if not self._look(block):
                again.append(block)
        pending.update(again)
        changes = Changes(tuple(self._removed), tuple(self._added))
        self._removed, self._added = {}, {}
        return changes

    def _look(self, block: int) -> bool:
        """Brings the set in step with `block`; False when it was moving and must be looked at again."""
        word = self._control.state[block]
        state, life = word & STATE_MASK, word >> GENERATION_SHIFT
        listed = self._listed.get(block)
        if listed is not None and (listed.life != life or state not in (INDEXED, EVICTING)):
            self._withdraw(block)
            listed = None
        if state == INDEXED and listed is None and not self._publish(block):
            return False
        self._seen[block] = word
        return True

    def _publish(self, block: int) -> bool:
        """Adds `block` after its ancestors; False, with nothing added, when the words moved while they were read."""
        state = self._control.state
        word, top = state[block], block
        chain: list[tuple[int, _Listed]] = []
        while True:
            now = state[top]
            link = self._control.parent[top]
            parent, depth = (link & PARENT_MASK) - 1, link >> DEPTH_SHIFT
            if now & STATE_MASK != INDEXED or (parent == NO_BLOCK) != (depth == 0) or parent >= len(state):
                return False
            chain.append((top, _Listed(self._control.key(top), now >> GENERATION_SHIFT, parent)))
            if parent == NO_BLOCK or self._is_current(parent):
                break
            if self._control.parent[parent] >> DEPTH_SHIFT != depth - 1:
                return False  # depth falls with every step, so the walk ends even over damaged words
            top = parent
        if state[block] != word:
            return False
        for member, listed in chain:
            if not self._make_room(member, listed.key):
                return False
        for member, listed in reversed(chain):
            self._add(member, listed)
        return True

    def _is_current(self, block: int) -> bool:
        """Whether `block` is published in the life it has now."""
        listed = self._listed.get(block)
        word = self._control.state[block]
        return listed is not None and listed.life == word >> GENERATION_SHIFT and word & STATE_MASK == INDEXED

    def _make_room(self, block: int, key: bytes) -> bool:
        """Withdraws what `block` was before, and the block that had `key` before; False if that one still lives."""
        if block in self._listed:
            self._withdraw(block)
        other = self._block_of.get(key)
        if other is None:
            return True
        if self._is_current(other):
            return False
        self._withdraw(other)
        return True

    def _add(self, block: int, listed: _Listed) -> None:
        self._listed[block] = listed
        self._block_of[listed.key] = block
        if listed.parent != NO_BLOCK:
            self._children.setdefault(listed.parent, set()).add(block)
        self._added[listed.key] = None

    def _withdraw(self, block: int) -> None:
        """Takes `block` and all that is published below it out of the set, children first."""
        below = [block]
        for member in below:  # grows while it is walked
            below.extend(self._children.pop(member, ()))
        for member in reversed(below):
            listed = self._listed.pop(member)
            siblings = self._children.get(listed.parent)
            if siblings is not None:
                siblings.discard(member)
                if not siblings:
                    del self._children[listed.parent]
            del self._block_of[listed.key]
            if listed.key in self._added:
                del self._added[listed.key]
            else:
                self._removed[listed.key] = None
            self._seen[member] = 0
