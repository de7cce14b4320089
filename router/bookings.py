"""The work that this process has sent to replicas, counted from the moment it is decided.

A replica reports its load a few times a second. Without bookings every request that is decided between two reports would
see the same idle replica, and they would all go there.

A booking is made at the choice, moved to the replica that really accepted, and released when the request ends. A request is at
one replica at a time, so its id names its booking; doing any of this again, or late, changes nothing.

How much of a replica's bookings comes on top of its report: those that the report cannot contain yet. A report contains a
request once it arrived `SETTLE_S` after the request was accepted (it takes that long to be queued, counted and sent).
Without a report all bookings count. A request whose first token has come owes no prompt tokens any more; it goes on as a
request that decodes.

The keys of a booked prompt are promised: the replica has them or is about to compute them, and a later request with
the same prefix waits for them there instead of computing them again. They are promised by that replica alone, also where others
share its pool: those have a block once it is sealed, and do not wait for one that is being computed. Every prompt holds
all keys before each of its keys, so the set of promised keys is prefix-closed, and the longest promised prefix is a binary
search.

Memory is bounded by the requests in flight. Costs: booking and releasing take a fraction of a microsecond per key, the
queries a few microseconds per replica. Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

SETTLE_S: Final = 0.1


@dataclass(slots=True)
class Booking:
    """One request at one replica. `accepted_at` is None until the replica took it. Times are monotonic seconds."""

    request_id: str
    replica_id: str
    prompt_tokens: int
    uncached_tokens: int
    keys: Sequence[bytes]
    booked_at: float
    accepted_at: float | None = None
    started: bool = False

    @property
    def owed_tokens(self) -> int:
        """Prompt tokens that the replica has yet to compute, as far as this process knows."""
        return 0 if self.started else self.uncached_tokens


@dataclass(slots=True)
class _Replica:
    bookings: dict[str, Booking] = field(default_factory=dict)
    unreported: dict[str, Booking] = field(default_factory=dict)  # of these, what no report contains yet
    owed_tokens: int = 0
    keys: Counter[bytes] = field(default_factory=Counter)


class Bookings:
    """See above."""

    def __init__(self) -> None:
        self._by_request: dict[str, Booking] = {}
        self._replicas: dict[str, _Replica] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def book(
        self,
        request_id: str,
        replica_id: str,
        prompt_tokens: int,
        cached_tokens: int,
        keys: Sequence[bytes],
        now: float,
    ) -> None:
        """The request is on its way to `replica_id`, where `cached_tokens` of its prompt are expected; not accepted yet.

        Takes the place of an earlier booking of the request. `keys` must not change while it is booked.
        """
        self.release(request_id)
        uncached_tokens = max(0, prompt_tokens - cached_tokens)
        self._add(Booking(request_id, replica_id, prompt_tokens, uncached_tokens, keys, now))

    def move(self, request_id: str, replica_id: str, cached_tokens: int, now: float) -> None:
        """`replica_id` has accepted the request (first said counts), with `cached_tokens` of its prompt.

        Nothing happens if the request is not booked.
        """
        booking = self._by_request.get(request_id)
        if booking is None:
            return
        uncached_tokens = max(0, booking.prompt_tokens - cached_tokens)
        if booking.replica_id != replica_id:
            self.release(request_id)
            booked_at = booking.booked_at
            booking = Booking(request_id, replica_id, booking.prompt_tokens, 0, booking.keys, booked_at)
            self._add(booking)
        if booking.accepted_at is None:
            booking.accepted_at = now
        replica = self._replicas[replica_id]
        replica.owed_tokens -= booking.owed_tokens
        booking.uncached_tokens = uncached_tokens
        replica.owed_tokens += booking.owed_tokens

    def start(self, request_id: str) -> None:
        """The first token has come: its prompt is computed."""
        booking = self._by_request.get(request_id)
        if booking is not None:
            self._replicas[booking.replica_id].owed_tokens -= booking.owed_tokens
            booking.started = True

    def release(self, request_id: str) -> None:
        """The request has ended, on whatever path."""
        booking = self._by_request.pop(request_id, None)
        if booking is None:
            return
        replica = self._replicas[booking.replica_id]
        del replica.bookings[request_id]
        replica.unreported.pop(request_id, None)
        if not replica.bookings:
            del self._replicas[booking.replica_id]
            return
        replica.owed_tokens -= booking.owed_tokens
        counts = replica.keys
        for key in booking.keys:
            left = counts[key] - 1
            if left:
                counts[key] = left
            else:
                del counts[key]

    def drop_replica(self, replica_id: str) -> None:
        """The replica is gone, and what was booked there with it."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            for request_id in replica.bookings:
                del self._by_request[request_id]

    def keep_replicas(self, replica_ids: Sequence[str]) -> None:
        """Drops every replica that is not among these."""
        for replica_id in self._replicas.keys() - set(replica_ids):
            self.drop_replica(replica_id)

    def requests(self, replica_id: str) -> int:
        """Returns how many requests are booked there."""
        replica = self._replicas.get(replica_id)
        return len(replica.bookings) if replica is not None else 0

    def load(self, replica_ids: Sequence[str], reported_at: Sequence[float | None]) -> list[tuple[int, int]]:
        """Returns for each replica the prompt tokens owed and the requests that its report does not contain.

        `reported_at`: when the newest report of each arrived; None counts everything. Reports only grow newer: what one of them
        contained stays contained. Mutates nothing that a caller can see.
        """
        return [self._load(replica_id, at) for replica_id, at in zip(replica_ids, reported_at, strict=True)]

    def promised_blocks(self, replica_ids: Sequence[str], keys: Sequence[bytes]) -> list[int]:
        """Returns for each replica how many of `keys`, from the first on, are keys of prompts booked there."""
        return [self._promised(replica_id, keys) for replica_id in replica_ids]

    def _load(self, replica_id: str, reported_at: float | None) -> tuple[int, int]:
        replica = self._replicas.get(replica_id)
        if replica is None:
            return 0, 0
        if reported_at is None:
            return replica.owed_tokens, len(replica.bookings)
        unreported = replica.unreported
        latest = reported_at - SETTLE_S
        for booking in [
            one for one in unreported.values() if one.accepted_at is not None and one.accepted_at <= latest
        ]:
            del unreported[booking.request_id]
        return sum(booking.owed_tokens for booking in unreported.values()), len(unreported)

    def _promised(self, replica_id: str, keys: Sequence[bytes]) -> int:
        replica = self._replicas.get(replica_id)
        if replica is None or not keys or keys[0] not in replica.keys:
            return 0
        held = replica.keys
        return bisect_left(keys, True, key=lambda key: key not in held)

    def _add(self, booking: Booking) -> None:
        self._by_request[booking.request_id] = booking
        replica = self._replicas.setdefault(booking.replica_id, _Replica())
        replica.bookings[booking.request_id] = booking
        replica.unreported[booking.request_id] = booking
        replica.owed_tokens += booking.owed_tokens
        replica.keys.update(booking.keys)
