"""The bookings of this process together with those who must hear of them: the other routers, and whoever waits for one here.

Every change of a booking made here is told to `announce`, in the order in which it happens, because it is told under the
lock. What other routers tell comes in by `apply_remote`, and counts like our own.

A decision that is made anew first withdraws the booking, so that the request does not compete with itself; the others hear of
that only when nothing takes its place.

Thread-safe: one lock, held for microseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from router.booking_event import BookingEvent, ladder_of
from router.booking_table import IntArray, Reported, Roll
from router.booking_waits import BookingWaits
from router.bookings import Bookings
from router.view import FloatColumn

_log = logging.getLogger(__name__)


class Ledger:
    """See above. Times are monotonic seconds, given by the caller."""

    def __init__(
        self, announce: Callable[[BookingEvent], None] | None, complain: Callable[[str], None] = _log.warning
    ) -> None:
        """`announce` must neither wait nor call back. Should it fail, `complain` is told, with the exception in progress."""
        self._lock = threading.Lock()
        self._bookings = Bookings()
        self._waits = BookingWaits(self.knows)
        self._announce = announce
        self._complain = complain

    # Bookings of this process

    def book(
        self, request_id: str, replica_id: str, prompt_tokens: int, cached_tokens: int, keys: bytes, now: float
    ) -> None:
        """See `Bookings.book`."""
        with self._lock:
            self._bookings.book(request_id, replica_id, prompt_tokens, cached_tokens, keys, now)
            self._tell_booked(request_id)

    def accept(
        self, request_id: str, replica_id: str, prompt_tokens: int, cached_tokens: int, keys: bytes, now: float
    ) -> None:
        """The replica has taken the request, whether it was booked, there or elsewhere, or not at all."""
        with self._lock:
            is_new = request_id not in self._bookings
            if is_new:
                self._bookings.book(request_id, replica_id, prompt_tokens, cached_tokens, keys, now)
            if self._bookings.move(request_id, replica_id, cached_tokens, now) or is_new:
                self._tell_booked(request_id)

    def start(self, request_id: str, now: float) -> None:
        """Its first token has come."""
        with self._lock:
            if self._bookings.start(request_id, now):
                self._tell(BookingEvent("start", request_id))

    def finish(self, request_id: str, now: float) -> None:
        """It has ended."""
        with self._lock:
            if self._bookings.finish(request_id, now):
                self._tell(BookingEvent("release", request_id))

    def release(self, request_id: str) -> None:
        """Its booking is void."""
        with self._lock:
            if self._bookings.release(request_id):
                self._tell(BookingEvent("release", request_id))

    def withdraw(self, request_id: str) -> bool:
        """Takes the booking away without a word. Returns whether there was one; then `confirm_withdrawn` must follow."""
        with self._lock:
            return self._bookings.release(request_id)

    def confirm_withdrawn(self, request_id: str) -> None:
        """The decision has been made anew: tells of the end of the booking if no other has taken its place."""
        with self._lock:
            if request_id not in self._bookings:
                self._tell(BookingEvent("release", request_id))

    def drop_replica(self, replica_id: str) -> None:
        """The replica is dead."""
        with self._lock:
            self._tell_ends(self._bookings.drop_replica(replica_id))

    def keep_replicas(self, replica_ids: Sequence[str]) -> None:
        """What this process booked at any other replica is void."""
        with self._lock:
            self._tell_ends(self._bookings.keep_replicas(replica_ids))

    # Those of others

    def apply_remote(self, origin: str, event: BookingEvent, now: float) -> None:
        """The router `origin` has told this; its events come in order. Repeating them is harmless."""
        with self._lock:
            if event.kind == "book":
                told = (event.request_id, event.replica_id, event.owed_tokens, event.ladder)
                self._bookings.book_remote(origin, *told, now)
                self._waits.booked(event.request_id)
            elif event.kind == "start":
                self._bookings.start_remote(origin, event.request_id, now)
            else:
                self._bookings.finish_remote(origin, event.request_id, now)

    def drop_origin(self, origin: str) -> None:
        """That router is gone, or some of what it told was missed."""
        with self._lock:
            self._bookings.drop_origin(origin)

    def tidy(self, now: float) -> None:
        """See `Bookings.tidy`."""
        with self._lock:
            self._bookings.tidy(now)

    # Answers

    def survey(
        self, roll: Roll, reported_at: FloatColumn, keys: bytes, blocks: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """See `Bookings.survey`: all of one moment."""
        with self._lock:
            return self._bookings.survey(roll, reported_at, keys, blocks)

    def see(
        self, known: Reported, depths: npt.NDArray[np.int32], keys: bytes, block_tokens: int, most_tokens: int
    ) -> IntArray:
        """See `Bookings.see`."""
        with self._lock:
            return self._bookings.see(known, depths, keys, block_tokens, most_tokens)

    def reach(self, keys: bytes, known: int) -> int:
        """See `Bookings.reach`."""
        with self._lock:
            return self._bookings.reach(keys, known)

    def counts(self) -> tuple[int, int]:
        """Returns how many bookings of this process there are, and of others."""
        with self._lock:
            return len(self._bookings), self._bookings.remote

    def requests(self, replica_id: str) -> int:
        """Returns how many requests of this process are booked at the replica."""
        with self._lock:
            return self._bookings.requests(replica_id)

    def knows(self, request_id: str) -> bool:
        """Whether any router's booking of the request is known here."""
        with self._lock:
            return self._bookings.knows(request_id)

    async def wait_booked(self, request_id: str, timeout_s: float) -> bool:
        """Returns True as soon as any router's booking of the request is known here, False after `timeout_s` without."""
        return await self._waits.wait(request_id, timeout_s)

    # The lock is held

    def _tell_booked(self, request_id: str) -> None:
        """Tells of a booking as it stands now."""
        self._waits.booked(request_id)
        booking = self._bookings.find(request_id)
        if booking is not None and self._announce is not None:
            ladder = ladder_of(booking.packed)
            self._tell(BookingEvent("book", request_id, booking.replica_id, booking.owed_tokens, ladder))

    def _tell_ends(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._tell(BookingEvent("release", request_id))

    def _tell(self, event: BookingEvent) -> None:
        if self._announce is not None:
            try:
                self._announce(event)
            except Exception:
                self._complain("a booking could not be told to the other routers")
