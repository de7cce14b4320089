"""Bookings as columns: a row each, without gaps, so that a decision looks at all of them in one pass of machine code.

A row is added at the end; when one is removed, the last takes its place. What the machine code compares stands in the columns
(`kernels/booking_columns.py` names them), the rest with the booking itself. Replicas have numbers here, given when first
heard of. Numbers of replicas without bookings are taken back when there are many; then `generation` rises, and numbers asked
for earlier mean nothing any more.

Memory: 88 bytes a row beside the booking itself, 8 a replica; columns grow by doubling and do not shrink. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.keys import KEY_BYTES
from kvpool.packed import address_of, address_of_array
from router.booking_event import Ladder
from router.kernels import booking_columns as kernels

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_ROWS: Final = 256
_REPLICAS: Final = 256
_SPARE_REPLICAS: Final = 1024
"""Numbers are taken back when so many, and half of all, belong to replicas without bookings."""
_COLUMNS: Final = (
    kernels.FIRST,
    kernels.BLOCKS,
    kernels.KEYS,
    kernels.RUNGS,
    kernels.REPLICA,
    kernels.OWED,
    kernels.ACCEPTED,
    kernels.STARTED,
    kernels.ENDED,
)


@dataclass(slots=True, eq=False)
class Booking:
    """One request at one replica, of this process (`origin` empty) or of another router.

    `packed`: all keys of the prompt's full blocks, or the rungs of a ladder. `accepted_at` is infinite until the replica took
    it (the earliest that this may have been), `started_at` until the first token, `ended_at` until the request ends. Times
    are monotonic seconds. `row` is the table's.
    """

    request_id: str
    replica_id: str
    prompt_tokens: int
    uncached_tokens: int
    packed: bytes
    booked_at: float
    origin: str = ""
    accepted_at: float = math.inf
    started_at: float = math.inf
    ended_at: float = math.inf
    blocks: int = 0
    rungs: int = 0
    row: int = field(default=-1, repr=False)

    @property
    def started(self) -> bool:
        """Whether the first token has come."""
        return self.started_at < math.inf

    @property
    def owed_tokens(self) -> int:
        """Prompt tokens that the replica has yet to compute, as far as this process knows."""
        return 0 if self.started else self.uncached_tokens


@dataclass(slots=True)
class Roll:
    """Replicas that are asked about together, each named once, and their numbers, which the table looks up when it must."""

    replica_ids: Sequence[str]
    numbers: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    address: int = 0
    generation: int = -1


class Reported(NamedTuple):
    """What the heartbeats of the replicas of `roll` said, as the machine code takes it. Made by `reported`."""

    roll: Roll
    held: tuple[IntArray, ...]
    slots: int
    loads: int
    since: int


def reported(roll: Roll, slots: IntArray, slots_at: int, words: IntArray) -> Reported:
    """Returns the columns together with their addresses; they must not change any more.

    `slots`, whose address is `slots_at`: of the replicas' pools in the mirror. `words`: eight contiguous rows, of which are read:
    prompt tokens queued (0), requests that run (1), the bits of two times, and requests that wait (3). What was accepted after
    the later time (7) is not in the heartbeat, what was accepted up to the earlier one (2) is, and what came between may be.
    """
    loads = address_of_array(words)
    return Reported(roll, (slots, words), slots_at, loads, loads + 2 * words.strides[0])


class BookingTable:
    """See above. `bookings` lists them by row."""

    def __init__(self) -> None:
        self.bookings: list[Booking] = []
        self.generation = 0
        """Rises when numbers of replicas change their meaning."""
        self._columns = {name: np.zeros(_ROWS, np.int64) for name in _COLUMNS}
        self._cells: dict[int, Any] = {}  # memoryviews of them, through which single numbers are written faster
        self._places = np.full(_REPLICAS, -1, np.int64)
        self._numbers: dict[str, int] = {}
        self._everyone = Roll(())
        self._record = np.zeros(kernels.WORDS // 8, np.int64)
        self._note_addresses()

    def add(self, booking: Booking) -> None:
        """Gives `booking` a row; its `packed` must not change while it has one."""
        row = booking.row = len(self.bookings)
        if row == len(self._columns[kernels.FIRST]):
            self._columns = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self._columns.items()}
            self._note_addresses()
        number = self._number(booking.replica_id)
        self.bookings.append(booking)
        cells = self._cells
        key_at = 8 if booking.rungs else 0
        first = int.from_bytes(booking.packed[key_at : key_at + 8], "little", signed=True) if booking.blocks else 0
        cells[kernels.FIRST][row] = first
        cells[kernels.BLOCKS][row] = booking.blocks
        cells[kernels.KEYS][row] = address_of(booking.packed)
        cells[kernels.RUNGS][row] = booking.rungs
        cells[kernels.REPLICA][row] = number
        self._record[kernels.COUNT // 8] = row + 1
        self.note(booking)

    def note(self, booking: Booking) -> None:
        """What the booking owes has changed, or when it was accepted, started or ended."""
        has_ended = booking.ended_at < math.inf
        self._cells[kernels.OWED][booking.row] = booking.uncached_tokens if has_ended else booking.owed_tokens
        self._cells[kernels.ACCEPTED][booking.row] = booking.accepted_at
        self._cells[kernels.STARTED][booking.row] = booking.started_at
        self._cells[kernels.ENDED][booking.row] = booking.ended_at

    def remove(self, booking: Booking) -> None:
        """Takes the row of `booking` back."""
        row, last = booking.row, self.bookings.pop()
        end = len(self.bookings)
        if row != end:
            for column in self._cells.values():
                column[row] = column[end]
            last.row = row
            self.bookings[row] = last
        booking.row = -1
        self._record[kernels.COUNT // 8] = end

    def survey(
        self, roll: Roll, since: FloatArray, keys: bytes, blocks: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Returns for each replica of `roll` the leading `keys` (packed) that bookings there promise, tokens owed, and requests.

        At least the `blocks` that are known are promised. Tokens and requests are those of bookings accepted after `since`, which
        holds no NaN, or not yet, and not ended.
        """
        numbers, count = self._numbers_of(roll)
        columns = np.empty((4, count), np.int64)  # one array, because asking for an address takes longer than a copy
        columns[0] = since.view(np.int64)
        columns[1] = blocks
        base, step = address_of_array(columns), 8 * count
        kernels.sum_bookings(
            *(self._address, numbers, count, base, address_of(keys), len(keys) // KEY_BYTES),
            *(base + step, base + 2 * step, base + 3 * step),
        )
        return columns[1], columns[2], columns[3]

    def see(
        self, known: Reported, depths: npt.NDArray[np.int32], keys: bytes, block_tokens: int, most_tokens: int
    ) -> IntArray:
        """Returns five columns of the replicas of `known`: tokens cached, queued, requests that run, tokens listed, requests that
        wait, booked ones that owe prompt tokens among them.

        `depths`: what the mirror lists of the prompt with these packed `keys`. Bookings are counted in all columns but that of
        tokens listed, and what has ended since the heartbeat in none.
        """
        numbers, count = self._numbers_of(known.roll)
        columns = np.zeros((11, count), np.int64)
        kernels.see_candidates(
            *(self._address, numbers, count, known.since, known.loads, known.slots),
            *(address_of_array(depths), len(depths)),
            *(address_of(keys), len(keys) // KEY_BYTES, block_tokens, most_tokens, address_of_array(columns)),
        )
        return columns[:5]

    def reach(self, keys: bytes, known: int) -> int:
        """Returns how many leading `keys` (packed) are promised by any booking; at least `known`."""
        roll = self._everyone
        if len(roll.replica_ids) != len(self._numbers) or roll.generation != self.generation:
            roll = self._everyone = Roll(tuple(self._numbers))
        count = len(self._numbers)
        blocks, _, _ = self.survey(roll, np.zeros(count), keys, np.full(count, known, np.int64))
        return int(blocks.max(initial=known))

    def _numbers_of(self, roll: Roll) -> tuple[int, int]:
        """Returns the address of the numbers of a roll, and how many there are."""
        if roll.generation != self.generation:
            roll.numbers = np.array([self._number(replica_id) for replica_id in roll.replica_ids], np.int64)
            roll.address, roll.generation = int(roll.numbers.ctypes.data), self.generation
        return roll.address, len(roll.numbers)

    def _number(self, replica_id: str) -> int:
        number = self._numbers.get(replica_id)
        if number is None:
            number = len(self._numbers)
            if number == len(self._places):
                self._places = np.full(2 * number, -1, np.int64)
                self._note_addresses()
            self._numbers[replica_id] = number
        return number

    def tidy(self) -> None:
        """Takes numbers back where many belong to replicas without bookings. Changes the generation if it does."""
        used = {booking.replica_id for booking in self.bookings}
        if len(self._numbers) - len(used) < max(_SPARE_REPLICAS, len(self._numbers) // 2):
            return
        self.generation += 1
        self._numbers = {replica_id: number for number, replica_id in enumerate(used)}
        for booking in self.bookings:
            self._columns[kernels.REPLICA][booking.row] = self._numbers[booking.replica_id]

    def _note_addresses(self) -> None:
        for name, column in self._columns.items():
            self._record[name // 8] = column.ctypes.data
            is_time = name in (kernels.ACCEPTED, kernels.STARTED, kernels.ENDED)
            cells: Any = column.view(np.float64) if is_time else column
            self._cells[name] = memoryview(cells)
        self._record[kernels.PLACES // 8] = self._places.ctypes.data
        self._address = self._record.ctypes.data


def packed_ladder(ladder: Ladder) -> bytes:
    """Returns the rungs as the machine code reads them."""
    return b"".join(blocks.to_bytes(8, "little") + key for blocks, key in ladder)
