"""Which pools hold which keys, for as many pools as there are: one table of keys, each with its holders.

A pool has a slot here, a number from 1 on; NO_SLOT is the slot of whoever has none, and its depth is always 0. A slot
that was taken is hidden until it is shown, so a snapshot is filled in while look-ups see the old picture, or nothing.
Dropping a slot is instant: it is hidden. Its bits are taken out later, some thousand rows at each `clean`, and then
it can be taken again; slots go round, so a number that somebody has just read stays meaningless for some time before
it means another pool.

One thread writes; any number may call `depths`, `keys`, `held` and `memory_bytes`. What they see is the table between
two calls of the writer into machine code (`kernels/`), each at most SLICE_KEYS keys or CLEAN_ROWS rows, well below a
millisecond. Between slices of something long the writer lets the others run. Only copying the table into a larger one
takes longer, and does not keep them waiting.

Memory: 32 bytes a row, one row a key whatever the number of its holders, in a table that is filled to between 0.62
and 0.84: 38 to 52 bytes a key. A key with more than seven holders takes 8 bytes more for every 64 slots; that memory has
up to an eighth more than was ever needed at once, and is given back when no key has so many holders. While the table
is copied both copies exist. Where many keys have gone it may be down to 0.3 full; below that cleaning makes it
smaller. Each thread that calls `depths` has 40 bytes for each key of the longest prompt it asked about.

Limits: 16,384 slots. Keys are hashes; numbers of one's own making may crowd in one place (`kernels/rows.py`), and if
a key finds no room there, `change` says that it was not as expected.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.keys import KEY_BYTES
from kvpool.packed import address_of
from router.kernels import key_entries as entries
from router.kernels.context import (
    CONTEXT_WORDS,
    END,
    HIDDEN,
    MAX_SLOTS,
    NONE,
    ROW_BYTES,
    SETS_FREE,
    SETS_MADE,
    SETS_USED,
    UNEXPECTED,
    USED,
)
from router.kernels.depths import SCRATCH, SCRATCH_MORE

NO_SLOT: Final = 0
SLICE_KEYS: Final = 4096
CLEAN_ROWS: Final = 4096
_FULL: Final = 0.84
_FILLED: Final = 0.62  # after growing or shrinking
_SPARSE: Final = 0.3
_FIRST_ROWS: Final = 1024
_CROWD_ROWS: Final = 1024  # beyond the last home
_SPARE_SLOTS: Final = 8  # fewer than these are not taken again, but new ones made


class _Words:
    """Words of memory that begin with a cache line, so that no row lies in two."""

    def __init__(self, words: int) -> None:
        self._room = np.empty(words + 7, np.int64)
        start: int = self._room.ctypes.data
        skip = -start % 64 // 8
        self.words = self._room[skip : skip + words]
        self.address: int = start + 8 * skip

    @property
    def nbytes(self) -> int:
        return self._room.nbytes


class _Hand(threading.local):
    """What one thread's look-ups write to."""

    def __init__(self) -> None:
        self.widen(64, 1)

    def widen(self, keys: int, set_words: int) -> None:
        """Makes room for prompts of `keys` keys and tables of so many times 64 slots."""
        self.set_words = set_words
        self.scratch_words = SCRATCH * keys + SCRATCH_MORE + set_words
        self._scratch = np.empty(self.scratch_words, np.int64)
        self.scratch: int = self._scratch.ctypes.data
        self.depths = np.zeros(64 * set_words + 1, np.int32)
        self.out: int = self.depths.ctypes.data


class KeyTable:
    """See above."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        """`give_way` is called between two slices of something long, by the writer: it should let other threads run."""
        self._give_way = give_way
        self._hand = _Hand()
        self._context = _Words(CONTEXT_WORDS)
        self._context.words[:] = 0
        self._ctx = self._context.address
        self._set(SETS_FREE, NONE)
        self._capacity = 0
        self._sets_room = 0
        self._set_words = 0
        self._next = 1  # slots from here on were never taken
        self._free: deque[int] = deque()
        self._dead: list[int] = []
        self._cleaning: list[int] = []
        self._place = 0
        self._use_sets(0, 1)
        self._use_rows(_FIRST_ROWS)

    def __len__(self) -> int:
        """Number of different keys, those that only hidden slots hold included."""
        return self._get(USED)

    @property
    def slots(self) -> int:
        """How many slots there may be before the table has to widen."""
        return 64 * self._set_words

    @property
    def unclean(self) -> int:
        """Dropped slots that are not yet cleaned."""
        return len(self._dead) + len(self._cleaning)

    def memory_bytes(self) -> int:
        """Returns the memory of rows, sets and what belongs to slots, but not that of each thread's look-ups."""
        parts = (self._context, self._rows, self._sets, self._live, self._dead_bits, self._held)
        return sum(part.nbytes for part in parts)

    # Any thread

    def depths(self, packed: bytes) -> npt.NDArray[np.int32]:
        """Returns how many of the packed keys, from the first on, each slot holds; 0 for slots that are hidden or
        nobody's.

        The index is the slot. Raises ValueError for a torn key.
        """
        number = _number_of(packed)
        hand = self._hand
        while True:
            words = entries.depths_of_keys(
                self._ctx, address_of(packed), number, hand.out, hand.set_words, hand.scratch, hand.scratch_words
            )
            if words != entries.TOO_SMALL:
                return hand.depths[: 64 * words + 1].copy()
            hand.widen(number, self._set_words)

    def held(self, slot: int) -> int:
        """Returns how many keys a slot holds."""
        return int(self._held.words[slot - 1]) if slot != NO_SLOT else 0

    def keys(self, slot: int) -> bytes:
        """Returns the packed keys that a slot holds, in no order.

        The table is read in pieces: of keys that come or go meanwhile, some are in it and some are not.
        """
        room = 4 * SLICE_KEYS
        out = np.empty(2 + 2 * room, np.int64)
        pieces = []
        place = 0 if slot != NO_SLOT else END
        while place != END:
            place = entries.keys_of_slot(self._ctx, slot - 1, place, SLICE_KEYS, out.ctypes.data, room)
            pieces.append(out[2 : 2 + 2 * int(out[0])].tobytes())
        return b"".join(pieces)

    # The one writer

    def take(self) -> int:
        """Returns a slot that holds nothing and is hidden; NO_SLOT when there are no more. `drop` gives it back."""
        if self.unclean > max(64, self._next // 2):
            self._clean_all()
        if self._next > self.slots and len(self._free) < _SPARE_SLOTS and self.slots < MAX_SLOTS:
            self._use_sets(self._sets_room, min(self._set_words + max(1, self._set_words // 4), MAX_SLOTS // 64))
        if self._next <= self.slots:
            slot = self._next
            self._next += 1
        else:
            if not self._free:
                self._clean_all()
            if not self._free:
                return NO_SLOT
            slot = self._free.popleft()
        self._set(HIDDEN, self._get(HIDDEN) + 1)
        return slot

    def show(self, slot: int) -> None:
        """Lets look-ups see a slot that was taken."""
        entries.show_slot(self._ctx, slot - 1)

    def drop(self, slot: int, shown: bool) -> None:
        """Takes a slot back, with all that it holds. `shown`: look-ups saw it."""
        if shown:
            entries.hide_slot(self._ctx, slot - 1)
        if self.held(slot) == 0:
            self._set(HIDDEN, self._get(HIDDEN) - 1)
            self._free.append(slot)
        else:
            self._dead.append(slot)

    def change(self, slot: int, removed: bytes, added: bytes, digest: int) -> tuple[int, bool]:
        """Takes the packed keys `removed` from a slot, then gives it `added`.

        Returns the digest, which was `digest`, after that, and whether every key was as expected: in before it was
        removed, and not in before it was added. One that is not changes nothing but the digest. Raises ValueError for
        a torn key.
        """
        gone, come = _number_of(removed), _number_of(added)
        from_, to = address_of(removed), address_of(added)
        expected = True
        digest = digest if digest < 1 << 63 else digest - (1 << 64)
        while True:
            some_gone = min(gone, SLICE_KEYS)
            some_come = min(come, SLICE_KEYS) if gone == some_gone else 0
            self._make_room(some_come)
            digest = entries.change_keys(self._ctx, slot - 1, from_, some_gone, to, some_come, digest)
            expected = expected and self._get(UNEXPECTED) == 0
            gone, come = gone - some_gone, come - some_come
            if gone + come == 0:
                return digest & (1 << 64) - 1, expected
            from_, to = from_ + KEY_BYTES * some_gone, to + KEY_BYTES * some_come
            self._give_way()

    def expect(self, keys: int) -> None:
        """Makes room for `keys` keys at once, which saves growing in steps."""
        if keys > _FULL * self._capacity:
            self._use_rows(int(keys / (_FULL + _FILLED) * 2))

    def clean(self) -> None:
        """Goes on taking out what dropped slots held, one slice; nothing when there is nothing to do."""
        if not self._cleaning:
            if not self._dead:
                return
            self._cleaning, self._dead, self._place = self._dead, [], 0
            self._mark_dead()
        self._place = entries.clean_rows(self._ctx, self._place, CLEAN_ROWS)
        if self._place == END:
            self._finish_cleaning()

    def _clean_all(self) -> None:
        while self.unclean:
            self.clean()
            self._give_way()

    def _mark_dead(self) -> None:
        self._dead_bits.words[:] = 0
        for slot in self._cleaning:
            self._dead_bits.words.view(np.uint64)[slot - 1 >> 6] |= np.uint64(1 << (slot - 1 & 63))

    def _finish_cleaning(self) -> None:
        for slot in self._cleaning:
            self._held.words[slot - 1] = 0
        self._set(HIDDEN, self._get(HIDDEN) - len(self._cleaning))
        self._free.extend(self._cleaning)
        self._cleaning = []
        used = len(self)
        if used < _SPARSE * self._capacity and self._capacity > _FIRST_ROWS:
            self._use_rows(max(_FIRST_ROWS, int(used / _FILLED)))
        if self._sets_room and self._get(SETS_USED) == 0:
            self._set(SETS_MADE, 0)
            self._set(SETS_FREE, NONE)
            self._use_sets(0, self._set_words)

    def _make_room(self, keys: int) -> None:
        """Sees to it that `keys` more keys fit."""
        used = self._get(USED)
        if used + keys > _FULL * self._capacity:
            self._use_rows(max(int((used + keys) / _FULL) + 1, int(used / _FILLED)))
        sets = self._get(SETS_USED) + min(keys, used)
        if sets > self._sets_room:
            self._use_sets(max(sets, self._sets_room + self._sets_room // 8), self._set_words)

    def _use_rows(self, capacity: int) -> None:
        """Moves all rows into a table for `capacity` homes; stays with the old one if they do not fit."""
        rows = capacity + _CROWD_ROWS
        fresh = _Words(rows * ROW_BYTES // 8)
        if entries.move_rows(self._ctx, fresh.address, capacity, rows):
            entries.use_rows(self._ctx, fresh.address, capacity, rows)
            self._rows, self._capacity = fresh, capacity

    def _use_sets(self, room: int, words: int) -> None:
        """Moves all sets to where there is room for so many, `words` wide."""
        sets = _Words(room * words)
        entries.move_sets(self._ctx, sets.address, words)
        live, dead, held = _Words(words), _Words(words), _Words(64 * words)
        for fresh, old in ((live, "_live"), (dead, "_dead_bits"), (held, "_held")):
            fresh.words[:] = 0
            if self._set_words:
                known = getattr(self, old).words
                fresh.words[: len(known)] = known
        entries.use_sets(self._ctx, sets.address, room, words, live.address, dead.address, held.address)
        self._sets, self._live, self._dead_bits, self._held = sets, live, dead, held
        self._sets_room, self._set_words = room, words

    def _get(self, field: int) -> int:
        return int(self._context.words[field >> 3])

    def _set(self, field: int, value: int) -> None:
        self._context.words[field >> 3] = value


def _number_of(packed: bytes) -> int:
    number, torn = divmod(len(packed), KEY_BYTES)
    if torn:
        raise ValueError(f"packed keys have {KEY_BYTES} bytes each, got {len(packed)} bytes")
    return number
