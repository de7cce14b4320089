"""What other routers tell of their bookings, and what of it is known here completely.

Each origin is followed by its numbers. The next one is applied, an old one is passed over. A number left out, in changes or in a
sign of life, means that something is missing: all bookings of that origin are dropped, and nothing of it counts until its
state has come. An origin that is heard of for the first time starts the same way. One that is silent for longer than the lease,
or says goodbye, is dropped and forgotten: a router that restarts comes back as another origin.

So after a loss, a repetition or a reordering this router counts less than there is for a moment, and never something that is not.

Limits: one thread calls `apply`, `lost` and `expire`; `counts` and `report` may be asked by any.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.directory.errors import MalformedEntry
from kvpool.directory.router_messages import Beat, Changes, Gone, Hello, Record, RouterMessage, State, decode
from router.booking_event import BookingEvent
from router.outbox import event_of

_log = logging.getLogger(__name__)


class RemoteBookings(Protocol):
    """Where bookings of other routers are kept: `RouteService`."""

    def apply_remote(self, origin: str, event: BookingEvent) -> None:
        """A booking of `origin` was made, has started, or has ended."""

    def drop_origin(self, origin: str) -> None:
        """Nothing is known of `origin` any more."""


@dataclass(slots=True)
class _Origin:
    heard_at: float
    number: int | None = None
    """Of the last changes applied; None while its state is not known."""
    requests: set[str] = field(default_factory=set)
    parts: list[State] = field(default_factory=list)


class Inbox:
    """See above. `own`: the origin whose words are passed over. `lease_s` in seconds."""

    def __init__(self, bookings: RemoteBookings, own: str, lease_s: float) -> None:
        self.counts: Counter[str] = Counter()
        """Changes applied (received); bookings dropped with their origin (dropped); gaps, malformed, states, expired."""
        self.is_asked = False
        """Somebody wants the state of this router; whoever answers sets it back."""
        self._bookings = bookings
        self._own = own
        self._lease_s = lease_s
        self._origins: dict[str, _Origin] = {}

    def apply(self, entry: bytes, now: float) -> None:
        """Takes one entry of the routers' log, heard at `now`."""
        try:
            message = decode(entry)
            if message.origin != self._own:
                self._hear(message, now)
        except MalformedEntry as error:
            self.counts["malformed"] += 1
            if self.counts["malformed"] == 1:
                _log.warning("what another router says is passed over, is it of another version? %s", error)

    def lost(self) -> None:
        """Entries of the log were missed: nothing that was known counts until it is told again."""
        for name, origin in self._origins.items():
            self._lose(name, origin)

    def expire(self, now: float) -> None:
        """Forgets the origins that are silent for longer than the lease."""
        for name in [name for name, one in self._origins.items() if one.heard_at + self._lease_s < now]:
            self.counts["expired"] += 1
            self._forget(name)

    def missing(self) -> set[str]:
        """Returns the origins whose state is to be asked for."""
        return {name for name, origin in self._origins.items() if origin.number is None}

    def known(self) -> tuple[int, int]:
        """Returns how many other routers are followed, and how many of their bookings are known."""
        origins = list(self._origins.values())
        return sum(one.number is not None for one in origins), sum(len(one.requests) for one in origins)

    def _hear(self, message: RouterMessage, now: float) -> None:
        if isinstance(message, Gone):
            self._forget(message.origin)
            return
        origin = self._origins.get(message.origin)
        if origin is None:
            origin = self._origins[message.origin] = _Origin(now)
        origin.heard_at = now
        if isinstance(message, Hello) and (not message.wanted or self._own in message.wanted):
            self.is_asked = True
        if isinstance(message, State):
            self._collect(origin, message)
        elif origin.number is not None:
            self._follow(origin, message, origin.number)

    def _follow(self, origin: _Origin, message: Changes | Beat | Hello, number: int) -> None:
        """Applies what comes next from an origin that is known up to `number`."""
        if isinstance(message, Changes) and message.number == number + 1:
            events = _events(message.records)
            origin.number = message.number
            self._tell(message.origin, origin, events)
        elif message.number > number:
            self.counts["gaps"] += 1
            self._lose(message.origin, origin)

    def _collect(self, origin: _Origin, message: State) -> None:
        """Takes a part of a state; the last one makes the origin known, unless that state is known already."""
        if origin.number is not None and message.number <= origin.number:
            return
        if message.part != len(origin.parts) or any(
            (one.number, one.parts) != (message.number, message.parts) for one in origin.parts[:1]
        ):
            origin.parts.clear()
        if message.part == len(origin.parts):
            origin.parts.append(message)
        if len(origin.parts) == message.parts:
            events = [event for part in origin.parts for event in _events(part.records)]
            self._lose(message.origin, origin)
            origin.number = message.number
            self.counts["states"] += 1
            self._tell(message.origin, origin, events)

    def _tell(self, name: str, origin: _Origin, events: list[BookingEvent]) -> None:
        for event in events:
            if event.kind == "book":
                origin.requests.add(event.request_id)
            elif event.kind == "release":
                origin.requests.discard(event.request_id)
            self._bookings.apply_remote(name, event)
        self.counts["received"] += len(events)

    def _lose(self, name: str, origin: _Origin) -> None:
        self.counts["dropped"] += len(origin.requests)
        origin.number = None
        origin.requests.clear()
        origin.parts.clear()
        self._bookings.drop_origin(name)

    def _forget(self, name: str) -> None:
        origin = self._origins.pop(name, None)
        if origin is not None:
            self._lose(name, origin)


def _events(records: tuple[Record, ...]) -> list[BookingEvent]:
    """Returns the events of `records`. Raises MalformedEntry, so that all of a message counts or nothing."""
    try:
        return [event_of(record) for record in records]
    except ValueError as error:
        raise MalformedEntry(f"a booking of another router is malformed: {error}") from None
