"""Guard mode: blocks are verified on their way, so that a stray write is found where it happened, with a name to it.

- `check_header`, once a step: the header's constants are what they were when the region was made.
- A block that is given back is filled with poison; when it is taken again the poison must be whole. A hole means that
  somebody wrote into a block that was not theirs any more.
- A block that is sealed gets a checksum of its bytes, its key and its token ids; when it is matched, let go, or taken
  after an eviction, they must still have it. A difference means that somebody wrote into a block that others read.
- Each block's record carries a magic number of its own; a wrong one means a stray write into the control part. A block
  that is let go must be in a state that its holder can have brought about.
- Where a match ends though the index has the key, the block there is verified as well: a record that was overwritten
  would else only look like a miss.
- The last four events of each block are kept (`history.py`).

Marks. What was left in a block is one word: poison or checksum, and the life (generation) of the block in which it was
written. Every way of giving a block up begins a new life, so a mark is good for content of its own life (matched, let go)
and, when the block is taken, of the life before: nobody can have written rightly in between. What processes without guard
mode do ends lives too, and so makes marks void instead of wrong; a region may be shared with them. Where a block goes
through one more life untouched (out of a local cache, back from an allocation that failed) the mark is carried along.

A mark is voided before bytes are changed and set after, so a death in between leaves none that is wrong.

A violation is raised after the operation's own work is done, or before anything is begun, so the pool stays whole. Letting
go raises what nobody was told before: letting go again goes through. Matching raises it each time.

Off by default. Limits: one or two passes over the bytes of a block each time it is sealed, matched, taken or let go. A
stray write into a block that its owner is still filling is not noticed, nor one into words that change all the time
(holders, last use, child counts: `integrity.py`). A block that goes from its seal to FREE in one step (evicted, or a
duplicate while the local cache is full) keeps its bytes instead of poison: a write into it is found all the same, but whoever
reads it reads what was there. A mark means nothing 2^30 lives later.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvpool import history, layout, words
from kvpool.control import Control
from kvpool.errors import GuardViolation
from kvpool.geometry import BlockGeometry
from kvpool.kernels.context import TABLE_BLOCKS
from kvpool.words import EVICTING, FREEING, INDEXED, LOCAL, MUTABLE, SEALED, STATE_MASK

if TYPE_CHECKING:
    from kvpool.block_table import BlockTable

POISON: Final = 0xF9
"""The byte that fills free blocks: as bfloat16, float16 or float32 a number so large that nobody takes it for a key."""
NOTHING, POISONED, SUMMED = 0, 1, 2
LIFE_MASK: Final = (1 << 30) - 1
_MIX: Final = 0x9E3779B97F4A7C15
_LOCAL_CACHE: Final = layout.SLOT_WORDS["local_cache"]
_split_key = Struct("=QQ").unpack


def magic_of(incarnation: int, capacity_blocks: int) -> npt.NDArray[np.uint64]:
    """Returns the magic number of every block of a region."""
    numbers = np.arange(1, capacity_blocks + 1, dtype=np.uint64) * np.uint64(_MIX)
    return numbers ^ np.uint64(incarnation)


def mark_of(control: Control, block: int) -> tuple[int, int, int]:
    """Returns what guard mode left in `block`: NOTHING, POISONED or SUMMED; in which life; the checksum."""
    word: int = control.checksum[block]
    return word >> 62, word >> 32 & LIFE_MASK, word & 0xFFFFFFFF


def life_of(state_word: int) -> int:
    """Returns the life of a block as marks have it."""
    return words.generation_of(state_word) & LIFE_MASK


class Guard:
    """Verifies blocks of one region, for the process in `slot`. Its caller serialises all calls; times are monotonic ns."""

    __slots__ = ("_block_bytes", "_control", "_header", "_kv", "_magic", "_past", "_slot", "_told")

    def __init__(
        self, control: Control, kv_memory: memoryview, geometry: BlockGeometry, incarnation: int, slot: int
    ) -> None:
        """`kv_memory`: the bytes of all blocks."""
        self._control = control
        # A view of our own: the region must be able to release its own.
        self._kv = np.frombuffer(memoryview(kv_memory), np.uint8)
        self._block_bytes = geometry.block_bytes
        self._slot = slot
        self._magic: list[int] = magic_of(incarnation, control.layout.capacity_blocks).tolist()
        self._header = bytes(control.header[: layout.HEADER_WORDS["check"] + 1])
        self._past: dict[int, tuple[int, str]] = {}  # block -> (life, request) when it was given back here
        self._told: set[tuple[int, int]] = set()  # (block, life) whose violation was raised

    # Each raises GuardViolation

    def check_header(self) -> None:
        """Verifies the constants of the header."""
        now = bytes(self._control.header[: len(self._header) // 8])
        if now == self._header:
            return
        word = next(at for at in range(len(now) // 8) if now[8 * at : 8 * at + 8] != self._header[8 * at : 8 * at + 8])
        name = max((at, name) for name, at in layout.HEADER_WORDS.items() if at <= word)[1]
        present = [slot for slot in range(layout.SLOTS) if history.process_in(self._control, slot)[0]]
        who = ", ".join(history.describe_process(self._control, slot) for slot in present)
        raise GuardViolation(f"the region's header was overwritten: {name} is not what it was; here are {who}")

    def took(self, blocks: Iterable[int], now_ns: int) -> None:
        """These blocks have just been taken, and are MUTABLE and ours. Voids their marks."""
        found = ""
        for block in blocks:
            found = found or self._magic_fault(block) or self._content_fault(block, self._life(block) - 1)
            self._control.checksum[block] = NOTHING
            self._note(block, history.TAKEN, now_ns)
        _raise(found)

    def sealing(self, block: int, key: bytes, tokens: bytes, now_ns: int) -> None:
        """This block is about to be sealed. Writes its key and token ids, and its checksum."""
        _raise(self._magic_fault(block))
        if not self._is_ours(block, (MUTABLE,)):
            return  # which sealing refuses
        self._control.checksum[block] = NOTHING
        # The checksum covers them, also when the request moves over to another block and nobody else writes them here.
        self._control.set_key(block, key)
        self._control.set_tokens(block, tokens)
        self._set_mark(block, SUMMED, self._life(block), self._sum(block))
        self._note(block, history.SEALED, now_ns)

    def sealed(self, own: int, block: int, key: bytes) -> None:
        """`own` was sealed, and `block` (the same, or one that has the key already) stands in its place now."""
        _raise(self._faults_in((block,)) if block != own else self._missed_fault(key, but=own))
        self.parked()

    def matched(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """These blocks were found under the first of `keys`, are held, and about to be read."""
        found = self._faults_in(blocks)
        if not found and len(blocks) < len(keys):
            found = self._missed_fault(keys[len(blocks)])
        _raise(found)

    def freeing(self, blocks: Iterable[int], now_ns: int) -> None:
        """These blocks, held once and by us, are about to be let go. Poisons those that will be free then."""
        found = ""
        for block in blocks:
            word = self._control.state[block]
            fault = self._magic_fault(block)
            if word & STATE_MASK not in (INDEXED, EVICTING) and not self._is_ours(block, (MUTABLE, SEALED)):
                fault = fault or f"the state of block {block} was overwritten{self.describe(block)}"
            elif word & STATE_MASK != MUTABLE:
                fault = fault or self._content_fault(block, life_of(word))
            if fault and (block, life_of(word)) not in self._told:
                self._told.add((block, life_of(word)))
                found = found or fault
            if self._is_ours(block, (MUTABLE, SEALED)):
                self._past[block] = (life_of(word), self._control.label(block))
                self._poison(block, life_of(word))
                self._note(block, history.GIVEN_BACK, now_ns)
        _raise(found)

    def parked(self) -> None:
        """Poisons what went into our local cache without `freeing`."""
        for block, now in self.local().items():
            before = now - 1 & LIFE_MASK
            kind, life, _ = mark_of(self._control, block)
            if (kind, life) != (POISONED, before):
                found = self._content_fault(block, before)
                self._poison(block, before)
                _raise(found)

    # These raise nothing

    def trying(self, table: BlockTable, count: int) -> None:
        """An allocation of `count` blocks for `table` is about to be tried. Makes room in its record."""
        table.record.reserve(len(table) + count)
        for place in self._places(table, count):
            table.record.words[place] = -1

    def undone(self, table: BlockTable, count: int) -> None:
        """It failed. The blocks it had taken meanwhile were given back untouched: their marks are carried into this life."""
        taken = [table.record.words[place] for place in self._places(table, count)]
        for block in taken:
            if block >= 0:
                self._carry(block, self._life(block) - 2)
        self.parked()

    def local(self) -> dict[int, int]:
        """Returns the blocks in our local cache, and their lives."""
        first = self._slot * layout.SLOT_WORD_COUNT + _LOCAL_CACHE
        listed = self._control.slots[first : first + layout.LOCAL_CACHE_BLOCKS]
        return {word - 1: self._life(word - 1) for word in listed if word and self._is_ours(word - 1, (LOCAL,))}

    def yielded(self, kept: Mapping[int, int]) -> None:
        """Those that were in our local cache and are free for all now keep their marks.

        Somebody may have one already: then the mark comes too late for him, and its life is over when the block is free
        again.
        """
        for block, life in kept.items():
            if self._life(block) != life:
                self._carry(block, life - 1)

    def reclaiming(self, dead: int, now_ns: int) -> None:
        """What the dead process of slot `dead` had is about to become free: poisons it."""
        owners = self._control.array("state") >> np.uint64(words.OWNER_SHIFT) & np.uint64(0xFF)
        for block in np.flatnonzero(owners == dead + 1).tolist():
            word = self._control.state[block]
            if word & STATE_MASK == LOCAL and mark_of(self._control, block)[:2] == (POISONED, life_of(word) - 1):
                self._carry(block, life_of(word) - 1)  # as it is, so that a hole is still found
            elif word & STATE_MASK in (LOCAL, MUTABLE, SEALED, FREEING):
                self._poison(block, life_of(word))
                self._note(block, history.RECLAIMED, now_ns)

    def describe(self, block: int) -> str:
        """Returns who has `block`, and who had it, as the second half of a sentence."""
        control = self._control
        owner = words.owner_of(control.state[block])
        who = f", which is {history.describe_process(control, owner)}" if 0 <= owner < layout.SLOTS else ""
        request = control.label(block) or "(none)"
        life, past = self._past.get(block, (-1, ""))
        before = f", before that of request {past!r}" if life == self._life(block) - 1 and past else ""
        events = "; ".join(event.describe() for event in history.events(control, block)) or "no events"
        return f": it is {words.describe(control.state[block])}{who}, of request {request!r}{before}; history: {events}"

    # What is wrong, in words; '' if nothing is

    def _faults_in(self, blocks: Iterable[int]) -> str:
        """Of indexed blocks."""
        for block in blocks:
            life = self._life(block)
            fault = self._magic_fault(block) or self._content_fault(block, life) or self._parent_fault(block)
            if fault:
                self._told.add((block, life))
                return fault
        return ""

    def _magic_fault(self, block: int) -> str:
        magic = self._control.magic[block]
        if magic == self._magic[block]:
            return ""
        return f"the record of block {block} was overwritten, its magic is {magic:#x}{self.describe(block)}"

    def _content_fault(self, block: int, life: int) -> str:
        """Of a block whose content should be what was left there in `life`."""
        kind, marked, checksum = mark_of(self._control, block)
        if kind == NOTHING or marked != life & LIFE_MASK:
            return ""
        if kind == POISONED:
            wrong = np.flatnonzero(self._bytes(block) != POISON)
            if not wrong.size:
                return ""
            what = f"{wrong.size} bytes of block {block} were written while it was free, from byte {wrong[0]} on"
            return f"{what}{self.describe(block)}"
        if self._sum(block) == checksum:
            return ""
        return f"block {block} was written to after it had been sealed{self.describe(block)}"

    def _missed_fault(self, key: bytes, but: int = -1) -> str:
        """Of blocks in the index where `key` would be, which nobody holds: they count if they lived on meanwhile."""
        control = self._control
        home, tag = _split_key(key)
        for step in range(layout.WINDOW):
            entry = control.index[home + step & control.layout.index_entries - 1]
            if not entry or entry >> 32 != tag & 0xFFFFFFFF:
                continue
            block = (entry & words.PARENT_MASK) - 1
            if not 0 <= block < control.layout.capacity_blocks:
                return (
                    f"the index was overwritten: an entry points to block {block} of {control.layout.capacity_blocks}"
                )
            before = control.state[block]
            if block != but and before & STATE_MASK == INDEXED:
                found = self._faults_in((block,))
                if found and control.state[block] == before:
                    return found
        return ""

    def _parent_fault(self, block: int) -> str:
        """Of an INDEXED block: its parent must be one too, one depth above."""
        control = self._control
        word = control.parent[block]
        parent, depth = (word & words.PARENT_MASK) - 1, word >> words.DEPTH_SHIFT
        if parent < 0:
            right = depth == 0
        else:
            right = (
                parent < control.layout.capacity_blocks
                and control.state[parent] & STATE_MASK in (INDEXED, EVICTING)
                and (control.parent[parent] >> words.DEPTH_SHIFT) + 1 == depth
            )
        return "" if right else f"the parent of block {block} was overwritten, it is {word:#x}{self.describe(block)}"

    # Words and bytes

    def _is_ours(self, block: int, states: tuple[int, ...]) -> bool:
        word = self._control.state[block]
        return word & STATE_MASK in states and words.owner_of(word) == self._slot

    def _life(self, block: int) -> int:
        return life_of(self._control.state[block])

    def _bytes(self, block: int) -> npt.NDArray[np.uint8]:
        return self._kv[block * self._block_bytes : (block + 1) * self._block_bytes]

    def _sum(self, block: int) -> int:
        known = self._control.key(block) + self._control.tokens(block)
        return zlib.crc32(known, zlib.crc32(self._bytes(block).data))

    def _poison(self, block: int, life: int) -> None:
        self._control.checksum[block] = NOTHING
        self._bytes(block)[:] = POISON
        self._set_mark(block, POISONED, life, 0)

    def _set_mark(self, block: int, kind: int, life: int, checksum: int) -> None:
        self._control.checksum[block] = kind << 62 | (life & LIFE_MASK) << 32 | checksum

    def _carry(self, block: int, life: int) -> None:
        """A mark of `life` becomes one of the life after that."""
        kind, marked, checksum = mark_of(self._control, block)
        if kind != NOTHING and marked == life & LIFE_MASK:
            self._set_mark(block, kind, marked + 1, checksum)

    @staticmethod
    def _places(table: BlockTable, count: int) -> range:
        """Where `count` more blocks stand in the record of `table`."""
        first = TABLE_BLOCKS // 8 + len(table)
        return range(first, first + count)

    def _note(self, block: int, event: int, now_ns: int) -> None:
        history.note(self._control, block, event, self._slot, now_ns)


def _raise(found: str) -> None:
    if found:
        raise GuardViolation(found)
