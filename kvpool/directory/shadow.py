"""What a pool should show to others: its indexed keys, followed by looking at the region's words.

The shadow keeps the published set: key, life (generation) and parent of every block that is listed, and the lives once more
as an array. `scan` looks at blocks whose dirty bit was set (`dirty.py`), or at all that are not listed in the life they have
now, or listed and not in it any more, and returns the difference as keys to remove and to add. What happens to a block before it
is INDEXED and after it has left costs nothing.

Withdrawing. A block whose life ended, or that is past EVICTING, leaves the set, and whatever was published below it leaves
first. (The pool evicts leaves only, so those are gone too; the scan may just not have come to them.) EVICTING itself may
still be taken back: nothing is decided.

Publishing. An INDEXED block is added after its parent, which is looked at in turn if it is not published in its present
life. The reads need no lock, because they are checked: the words of the chain are read from the child up to the first
published ancestor, and then the child's word again. If the child is INDEXED in the same life before and after, its
ancestors were in one life all the time between (somebody may try to evict a parent with an indexed child, and has to take it
back), so what was read there was right. Otherwise the block waits for the next scan.

So the set is prefix-closed after every single step, and its insertion order has parents before children.

Limits: memory is bounded by the capacity, about 400 bytes a published block. A scan stops after `limit` changes and goes
on with the rest next time. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from numba import njit

from kvpool.control import Control
from kvpool.directory import dirty
from kvpool.words import DEPTH_SHIFT, EVICTING, GENERATION_SHIFT, INDEXED, PARENT_MASK, STATE_MASK

NO_BLOCK: Final = -1
NOT_LISTED: Final = 0


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
    life: int  # as `_life` has it
    parent: int


class Shadow:
    """Follows the region behind `control`, whose dirty bits it consumes: one shadow at a time for each region."""

    def __init__(self, control: Control) -> None:
        blocks = len(control.state)
        self._control = control
        self._seen = np.zeros(blocks, dtype=np.uint64)  # the life in which each block is listed, or NOT_LISTED
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
        """Looks at what changed (`everything`: compares all words), up to about `limit` changes; returns them.

        Fewer than `limit` changes: it came to the end of what it knew to be changed.
        """
        pending = self._pending
        pending.update(dirty.take(self._control.array("dirty"), self._room))
        if everything:
            differing = _compare(self._control.array("state"), self._seen, self._room, *_FORM)
            pending.update(self._room[:differing].tolist())
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
        listed = self._listed.get(block)
        if listed is not None and listed.life != _life(word):
            self._withdraw(block)
            listed = None
        return listed is not None or word & STATE_MASK != INDEXED or self._publish(block)

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
            chain.append((top, _Listed(self._control.key(top), _life(now), parent)))
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
        return listed is not None and listed.life == _life(self._control.state[block])

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
        self._seen[block] = listed.life
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
            self._seen[member] = NOT_LISTED
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


def _life(word: int) -> int:
    """The life of a block that may be listed, from its state word: never 0; NOT_LISTED where it may not be."""
    return (word >> GENERATION_SHIFT) + 1 if word & STATE_MASK in (INDEXED, EVICTING) else NOT_LISTED


# Handed over with each call, because numba's cache outlives a change of constants in another file.
_FORM: Final = tuple(np.uint64(value) for value in (STATE_MASK, GENERATION_SHIFT, INDEXED, EVICTING))


@njit(cache=True)
def _compare(
    words: npt.NDArray[np.uint64],
    seen: npt.NDArray[np.uint64],
    blocks: npt.NDArray[np.int64],
    state_mask: np.uint64,
    generation_shift: np.uint64,
    indexed: np.uint64,
    evicting: np.uint64,
) -> int:
    """Writes the blocks whose `_life` is not the one `seen` to `blocks`; returns how many. Each is looked at again."""
    count = 0
    for block in range(len(words)):
        word = words[block]
        state = word & state_mask
        life = np.uint64(0)
        if state in (indexed, evicting):
            life = (word >> generation_shift) + np.uint64(1)
        if life != seen[block]:
            blocks[count] = block
            count += 1
    return count
