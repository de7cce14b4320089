"""One process's hands on the blocks of a region: moving states, counting holders, free blocks.

Holding. The region knows which slots hold a block (one bit each); how many requests of a slot do is private to its
process (`refs`). The first request sets the bit, the last one clears it. What a block becomes when nobody here holds
it depends on its state: INDEXED stays matchable and becomes idle; MUTABLE and SEALED are given back.

Taking. Local cache (4 blocks, recorded in the process slot so that a death loses none), then the bitmap of free
blocks, lowest number first, so runs stay contiguous. A free bit is only a HINT: a block is ours once its state word
went from FREE to us, and a bit whose block is not FREE is cleared and passed over; a bit that is missing is restored
from the states when the bitmap runs dry too early. Giving back goes the same way round.

`free`, `local` and `idle` count blocks in those conditions, so that asking for room costs nothing; the integrity
check compares them with the states.

Limits: the caller serialises all calls; one process mutates a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvpool import words
from kvpool.control import Control
from kvpool.layout import COUNTERS, LOCAL_CACHE_BLOCKS, SLOT_BYTES, SLOT_WORDS
from kvpool.words import FREE, GENERATION_SHIFT, INDEXED, LOCAL, MUTABLE, NO_SLOT, STATE_MASK

SLOT_WORD_COUNT: Final = SLOT_BYTES // 8


class Blocks:
    """Blocks of one region, mutated on behalf of process slot `slot`.

    `refs[b]`: requests of this process that hold block b. `held`: blocks with refs > 0. `on_idle_leaf(block)` is
    called when a block becomes idle and has no children.
    """

    __slots__ = (
        "_cursor",
        "_local_word",
        "_slot_base",
        "bit",
        "control",
        "free",
        "held",
        "idle",
        "local",
        "on_idle_leaf",
        "refs",
        "slot",
    )

    def __init__(self, control: Control, slot: int, on_idle_leaf: Callable[[int], None]) -> None:
        """The region must be at rest: blocks FREE or INDEXED, no holders (what `recovery.recover` leaves)."""
        self.control = control
        self.slot = slot
        self.bit = 1 << slot
        self.on_idle_leaf = on_idle_leaf
        self.refs = [0] * control.layout.capacity_blocks
        states = control.array("state") & np.uint64(STATE_MASK)
        self.free = int(np.count_nonzero(states == FREE))
        self.idle = int(np.count_nonzero(states == INDEXED))
        self.local: list[int] = []
        self.held = 0
        self._slot_base = slot * SLOT_WORD_COUNT
        self._local_word = self._slot_base + SLOT_WORDS["local_cache"]
        self._cursor = 0

    def count(self, counter: str, amount: int = 1) -> None:
        """Adds `amount` to one of the slot's counters."""
        self.control.slots[self._slot_base + COUNTERS[counter]] += amount

    def count_peak(self, counter: str, value: int) -> None:
        """Raises one of the slot's counters to `value` if it is lower."""
        word = self._slot_base + COUNTERS[counter]
        if value > self.control.slots[word]:
            self.control.slots[word] = value

    def counter(self, counter: str) -> int:
        """Returns one of the slot's counters."""
        value: int = self.control.slots[self._slot_base + COUNTERS[counter]]
        return value

    def set_slot_word(self, name: str, value: int) -> None:
        """Writes a field of the process slot."""
        self.control.slots[self._slot_base + SLOT_WORDS[name]] = value

    def state(self, block: int) -> int:
        """Returns the state of `block`."""
        word: int = self.control.state[block]
        return word & STATE_MASK

    def move(self, block: int, state: int, slot: int) -> None:
        """Moves `block` to `state` with owner `slot`, along a legal step (AssertionError), and marks it dirty."""
        control = self.control
        control.state[block] = words.moved(control.state[block], state, slot)
        control.dirty[block >> 6] |= 1 << (block & 63)

    def owned(self, block: int) -> bool:
        """Whether `block` is MUTABLE, ours, and held by exactly one request."""
        word = self.control.state[block]
        return word & STATE_MASK == MUTABLE and words.owner_of(word) == self.slot and self.refs[block] == 1

    def indexed_keys(self) -> bytes:
        """Returns the keys of all indexed blocks, packed."""
        states = self.control.array("state") & np.uint64(STATE_MASK)
        return b"".join(self.control.key(block) for block in np.flatnonzero(states == INDEXED).tolist())

    def hold(self, block: int) -> None:
        """One more request of this process holds `block`."""
        refs = self.refs[block] + 1
        self.refs[block] = refs
        if refs > 1:
            self.count_peak("peak_holders", refs)
            return
        before = self.control.holders[block]
        self.control.holders[block] = before | self.bit
        self.held += 1
        if before == 0 and self.control.state[block] & STATE_MASK == INDEXED:
            self.idle -= 1

    def drop(self, block: int, now_ns: int) -> None:
        """One request of this process lets go of `block`. The last one makes it idle, or gives it back.

        Raises AssertionError when no request holds it.
        """
        self.drop_all((block,), now_ns)

    def drop_all(self, blocks: Iterable[int], now_ns: int) -> None:
        """`drop` for each of `blocks`, in order."""
        control, all_refs, keep = self.control, self.refs, ~self.bit
        state, holders = control.state, control.holders
        for block in blocks:
            refs = all_refs[block] - 1
            assert refs >= 0, f"block {block} is given back more often than it was held"
            all_refs[block] = refs
            if refs:
                continue
            holders[block] = left = holders[block] & keep
            self.held -= 1
            if state[block] & STATE_MASK != INDEXED:
                self._give_back(block)
            elif left == 0:
                self.idle += 1
                control.last_use[block] = now_ns
                if control.children[block] == 0:
                    self.on_idle_leaf(block)

    def _give_back(self, block: int) -> None:
        local = self.local
        if len(local) < LOCAL_CACHE_BLOCKS:
            self.move(block, LOCAL, self.slot)
            self.control.slots[self._local_word + len(local)] = block + 1
            local.append(block)
        else:
            self.set_free(block)

    def set_free(self, block: int) -> None:
        """Moves `block` to FREE (from any state that may) and sets its free bit."""
        self.move(block, FREE, NO_SLOT)
        self.control.free[block >> 6] |= 1 << (block & 63)
        self.free += 1
        if block >> 6 < self._cursor:
            self._cursor = block >> 6

    def take(self, count: int, tag: int) -> list[int]:
        """Returns up to `count` blocks, now MUTABLE, ours and held once, with request tag `tag`: local ones, then
        free ones.
        """
        taken: list[int] = []
        while self.local and len(taken) < count:
            taken.append(self.local.pop())
            self.control.slots[self._local_word + len(self.local)] = 0
        from_local = len(taken)
        self._claim_free(taken, count)
        if len(taken) < count <= from_local + self.free:
            self._restore_free_bits(taken)
            self._claim_free(taken, count)
        self._hand_over(taken, tag)
        self.held += len(taken)
        self.free -= len(taken) - from_local
        if taken:
            self.count_peak("peak_holders", 1)
        return taken

    def _hand_over(self, taken: list[int], tag: int) -> None:
        """Moves blocks that are FREE, or LOCAL and ours, to MUTABLE (no step of the generation), held once."""
        control, refs, bit = self.control, self.refs, self.bit
        state, holders, filled, tags, dirty = (
            control.state,
            control.holders,
            control.filled,
            control.request_tag,
            control.dirty,
        )
        mine = words.pack(MUTABLE, self.slot, 0)
        for block in taken:
            word = state[block]
            assert word & STATE_MASK in (FREE, LOCAL), f"block {block} was taken but is {words.describe(word)}"
            state[block] = word >> GENERATION_SHIFT << GENERATION_SHIFT | mine
            dirty[block >> 6] |= 1 << (block & 63)
            holders[block] = bit
            filled[block] = 0
            tags[block] = tag
            refs[block] = 1

    def _claim_free(self, taken: list[int], count: int) -> None:
        """Extends `taken` to `count` blocks that are FREE, clearing their bits; stops early when the bitmap has no
        more.
        """
        bitmap, state = self.control.free, self.control.state
        cursor, end = self._cursor, len(bitmap)
        while len(taken) < count and cursor < end:
            bits = bitmap[cursor]
            while bits and len(taken) < count:
                lowest = bits & -bits
                bits ^= lowest
                block = (cursor << 6) + lowest.bit_length() - 1
                if state[block] & STATE_MASK == FREE:
                    taken.append(block)
            bitmap[cursor] = bits
            if not bits:
                cursor += 1
        self._cursor = cursor

    def _restore_free_bits(self, taken: list[int]) -> None:
        """Sets the bits of all blocks that are FREE and not in `taken`: some had been lost."""
        states = self.control.array("state") & np.uint64(STATE_MASK)
        for block in np.setdiff1d(np.flatnonzero(states == FREE), taken).tolist():
            self.control.free[block >> 6] |= 1 << (block & 63)
        self._cursor = 0

    def flush_local(self) -> None:
        """Returns the local cache's blocks to the free ones."""
        while self.local:
            block = self.local.pop()
            self.control.slots[self._local_word + len(self.local)] = 0
            self.set_free(block)
