"""The work that routers have sent to replicas, counted from the moment it is decided.

A replica reports its load a few times a second. Without bookings every request that is decided between two reports would
see the same idle replica, and they would all go there.

A booking is made at the choice, moved to the replica that really accepted, and released when the request ends. A request is at
one replica at a time, so its id names its booking; doing any of this again, or late, changes nothing.

How much of a replica's bookings comes on top of its report: those that the report cannot contain yet. A report contains a
request once the replica looked `SETTLE_S` after it accepted the request (it takes that long to be queued and counted). The
replica may have accepted it `HEARD_S` before that was heard of here. Without a report all bookings count. A request whose
first token has come owes no prompt tokens any more; it goes on as a request that decodes.

The keys of a booked prompt are promised: the replica has them or is about to compute them, and a later request with
the same prefix waits for them there instead of computing them again. They are promised by that replica alone, also where others
share its pool: those have a block once it is sealed, and do not wait for one that is being computed.

A request that has ended counts no more, also where the newest report is from before its end and still contains it: that is
taken off the report. Without it, a replica that answers one short request after the other would look busy all the time. What it
computed is promised for `LINGER_S` longer, because the directory hears of a block a moment after the client has the
answer, and a conversation's next turn may be faster.

Other routers' bookings stand in the same table, under their origin and the request's id. They bring a ladder of keys in place
of all (`booking_event.py`). When they were accepted is not known: they count as accepted when they were heard of. One that is
older than `REMOTE_LIFE_S` is dropped, because whoever made it may be gone without a word.

Memory is bounded by the requests in flight and those that ended within `LINGER_S`. Booking and releasing cost the same whatever
the length of the prompt, a few microseconds; what `survey` costs, `kernels/booking_columns.py` says. Not thread-safe: the owner
holds a lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.keys import KEY_BYTES
from router.booking_event import Ladder
from router.booking_table import Booking, BookingTable, IntArray, Reported, Roll, packed_ladder

SETTLE_S: Final = 0.1
HEARD_S: Final = 0.02
REMOTE_LIFE_S: Final = 600.0
LINGER_S: Final = 0.5
"""The directory shows a block within some tens of milliseconds; a report is sent within 0.05 s of a change."""


class Bookings:
    """See above. Without an origin in its name, a method is about bookings of this process."""

    def __init__(self) -> None:
        self._table = BookingTable()
        self._own: dict[str, Booking] = {}
        self._remote: dict[str, dict[str, Booking]] = {}  # by origin, each the longest known first
        self._at: dict[str, dict[str, Booking]] = {}  # this process's, by replica
        self._over: deque[Booking] = deque()  # ended, of any router, the longest ago first

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._own

    @property
    def remote(self) -> int:
        """How many bookings of other routers are known."""
        return len(self._table.bookings) - len(self._own) - len(self._over)

    def find(self, request_id: str) -> Booking | None:
        """Returns the booking of a request; its owner changes it only through the methods here."""
        return self._own.get(request_id)

    def knows(self, request_id: str) -> bool:
        """Whether any router's booking of the request is known."""
        return request_id in self._own or any(request_id in known for known in self._remote.values())

    def book(
        self, request_id: str, replica_id: str, prompt_tokens: int, cached_tokens: int, keys: bytes, now: float
    ) -> None:
        """The request is on its way to `replica_id`, where `cached_tokens` of its prompt are expected; not accepted yet.

        Takes the place of an earlier booking of the request. `keys` are packed.
        """
        self.release(request_id)
        self._add(
            Booking(
                request_id,
                replica_id,
                prompt_tokens,
                max(0, prompt_tokens - cached_tokens),
                keys,
                now,
                blocks=len(keys) // KEY_BYTES,
            )
        )

    def move(self, request_id: str, replica_id: str, cached_tokens: int, now: float) -> bool:
        """`replica_id` has accepted the request (first said counts), with `cached_tokens` of its prompt.

        Returns whether replica or tokens are others than were booked. Nothing happens if the request is not booked.
        """
        booking = self._own.get(request_id)
        if booking is None:
            return False
        before = (booking.replica_id, booking.owed_tokens)
        if booking.replica_id != replica_id:
            self.release(request_id)
            booking.replica_id, booking.accepted_at, booking.started_at = replica_id, math.inf, math.inf
            self._add(booking)
        if booking.accepted_at == math.inf:
            booking.accepted_at = max(booking.booked_at, now - HEARD_S)
        booking.uncached_tokens = max(0, booking.prompt_tokens - cached_tokens)
        self._table.note(booking)
        return before != (booking.replica_id, booking.owed_tokens)

    def start(self, request_id: str, now: float) -> bool:
        """The first token has come: its prompt is computed. Returns whether that was new."""
        return self._start(self._own.get(request_id), now)

    def finish(self, request_id: str, now: float) -> bool:
        """The request has ended, on whatever path. Returns whether it was booked."""
        booking = self._taken(request_id)
        if booking is not None:
            self._end(booking, now)
        return booking is not None

    def release(self, request_id: str) -> bool:
        """The booking is void, and what it promised with it. Returns whether there was one."""
        booking = self._taken(request_id)
        if booking is not None:
            self._table.remove(booking)
        return booking is not None

    def drop_replica(self, replica_id: str) -> list[str]:
        """The replica is gone, and what any router booked there with it. Returns the requests of this process."""
        for origin, known in list(self._remote.items()):
            for request_id in [name for name, booking in known.items() if booking.replica_id == replica_id]:
                self.release_remote(origin, request_id)
        for booking in [one for one in self._over if one.replica_id == replica_id]:
            self._over.remove(booking)
            self._table.remove(booking)
        return self._release_all(replica_id)

    def keep_replicas(self, replica_ids: Sequence[str]) -> list[str]:
        """Drops what this process booked at others than these; returns those requests.

        Other routers' bookings stay: they may have heard of a replica first, and tell of the end themselves.
        """
        lost = self._at.keys() - set(replica_ids)
        return [request_id for replica_id in lost for request_id in self._release_all(replica_id)]

    def requests(self, replica_id: str) -> int:
        """Returns how many requests of this process are booked there."""
        return len(self._at.get(replica_id, ()))

    # Other routers'

    def book_remote(
        self, origin: str, request_id: str, replica_id: str, owed_tokens: int, ladder: Ladder, now: float
    ) -> None:
        """The router `origin` has booked the request; takes the place of its earlier booking of it."""
        self.release_remote(origin, request_id)
        packed, blocks = packed_ladder(ladder), ladder[-1][0] if ladder else 0
        booking = Booking(
            *(request_id, replica_id, owed_tokens, owed_tokens, packed, now, origin, now),
            blocks=blocks,
            rungs=len(ladder),
        )
        self._remote.setdefault(origin, {})[request_id] = booking
        self._table.add(booking)

    def start_remote(self, origin: str, request_id: str, now: float) -> None:
        """Its first token has come."""
        self._start(self._remote.get(origin, {}).get(request_id), now)

    def finish_remote(self, origin: str, request_id: str, now: float) -> None:
        """It has ended."""
        booking = self._taken_remote(origin, request_id)
        if booking is not None:
            self._end(booking, now)

    def release_remote(self, origin: str, request_id: str) -> None:
        """The booking is void."""
        booking = self._taken_remote(origin, request_id)
        if booking is not None:
            self._table.remove(booking)

    def drop_origin(self, origin: str) -> None:
        """That router is gone, or what is known of it is worthless: its bookings with it."""
        for booking in self._remote.pop(origin, {}).values():
            self._table.remove(booking)

    def tidy(self, now: float) -> None:
        """Drops remote bookings that are too old and promises of what has ended, and gives back what replicas that are gone took.

        For about once a second.
        """
        self._forget(now)
        for origin, known in list(self._remote.items()):
            for request_id, booking in list(known.items()):
                if now - booking.booked_at <= REMOTE_LIFE_S:
                    break
                self.release_remote(origin, request_id)
        self._table.tidy()

    # Answers

    def survey(
        self, roll: Roll, reported_at: npt.NDArray[np.float64], keys: bytes, blocks: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Returns for each replica of `roll` what of a prompt is promised there, and what its report does not contain.

        That is: the leading blocks promised of the prompt with these packed `keys`, at least the `blocks` that are known; prompt
        tokens owed; requests. `reported_at`: when the newest report of each arrived; minus infinity counts everything.
        """
        return self._table.survey(roll, reported_at - SETTLE_S, keys, blocks)

    def see(
        self, known: Reported, depths: npt.NDArray[np.int32], keys: bytes, block_tokens: int, most_tokens: int
    ) -> IntArray:
        """See `BookingTable.see`; the `since` of `known` is `SETTLE_S` before the reports arrived."""
        return self._table.see(known, depths, keys, block_tokens, most_tokens)

    def reach(self, keys: bytes, known: int) -> int:
        """Returns how many leading blocks of a prompt with these packed keys any booking promises; at least `known`."""
        return self._table.reach(keys, known)

    def _add(self, booking: Booking) -> None:
        self._own[booking.request_id] = booking
        self._at.setdefault(booking.replica_id, {})[booking.request_id] = booking
        self._table.add(booking)

    def _start(self, booking: Booking | None, now: float) -> bool:
        if booking is None or booking.started:
            return False
        booking.started_at = now
        self._table.note(booking)
        return True

    def _taken(self, request_id: str) -> Booking | None:
        """Returns the booking of a request of this process, which is none any more; it still has its row."""
        booking = self._own.pop(request_id, None)
        if booking is not None:
            there = self._at[booking.replica_id]
            del there[request_id]
            if not there:
                del self._at[booking.replica_id]
        return booking

    def _taken_remote(self, origin: str, request_id: str) -> Booking | None:
        known = self._remote.get(origin, {})
        booking = known.pop(request_id, None)
        if booking is not None and not known:
            del self._remote[origin]
        return booking

    def _end(self, booking: Booking, now: float) -> None:
        """What has no first token has promised nothing that is there: it goes at once."""
        self._forget(now)
        if booking.started:
            booking.ended_at = now
            self._table.note(booking)
            self._over.append(booking)
        else:
            self._table.remove(booking)

    def _forget(self, now: float) -> None:
        while self._over and self._over[0].ended_at <= now - LINGER_S:
            self._table.remove(self._over.popleft())

    def _release_all(self, replica_id: str) -> list[str]:
        lost = list(self._at.get(replica_id, ()))
        for request_id in lost:
            self.release(request_id)
        return lost
