"""What this router has to tell the others of its bookings, and in which words.

`announce` takes each change, from any thread and in microseconds; it keeps all bookings that live, and a bounded line of changes
not told yet. `entries` turns the line into messages (`kvpool/directory/router_messages.py`), for one thread that writes them.

When changes are lost, because the line was full or because nobody knows whether a write arrived, the line is worth nothing:
a number is left out, so that everybody who follows finds a gap, and the whole state goes out instead. So does it when
somebody asks, but not more often than every `RESEND_S`.

Limits: memory is one booking for each request in progress, and `most` changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvpool.directory.router_messages import (
    Beat,
    Changes,
    Gone,
    Hello,
    Record,
    RouterMessage,
    State,
    encode,
    grouped,
)
from router.booking_event import BookingEvent

BEAT_S: Final = 0.2
RESEND_S: Final = 0.1


class OutboxCounts(NamedTuple):
    """Totals of changes sent, changes that found the line full or Redis away (the state tells of them), and states sent."""

    sent: int
    dropped: int
    states: int


class Outbox:
    """See above. `origin`: 16 hexadecimal digits that no other router has. `clock` gives monotonic seconds."""

    def __init__(self, origin: str, clock: Callable[[], float], most: int = 4096) -> None:
        self.origin = origin
        self.wake = threading.Event()
        """Set when there is something to tell."""
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        self._live: dict[str, tuple[BookingEvent, bool]] = {}
        self._line: list[BookingEvent] = []
        self._lost = False
        self._asked = True  # nobody has our state yet
        self._missed: set[str] | None = None
        self._number = 0
        self._spoke_at = self._resent_at = clock() - max(BEAT_S, RESEND_S)
        self._sent = self._dropped = self._states = 0

    def announce(self, event: BookingEvent) -> None:
        """Notes a change of a booking of this process. Never waits for anybody who writes."""
        with self._lock:
            if event.kind == "book":
                self._live[event.request_id] = (event, False)
            elif event.request_id not in self._live:
                return
            elif event.kind == "start":
                self._live[event.request_id] = (self._live[event.request_id][0], True)
            else:
                del self._live[event.request_id]
            if self._lost:
                self._dropped += 1
            elif len(self._line) < self._most:
                self._line.append(event)
            else:
                self._lose()
                self._dropped += 1
        if not self.wake.is_set():
            self.wake.set()

    def asked(self) -> None:
        """Somebody wants the whole state."""
        with self._lock:
            self._asked = True
        self.wake.set()

    def ask(self, origins: set[str]) -> None:
        """The next entries ask these origins for their state; all of them when it is empty."""
        with self._lock:
            if not origins:
                self._missed = set()
            elif self._missed is None:
                self._missed = set(origins)
            elif self._missed:
                self._missed |= origins
        self.wake.set()

    def failed(self) -> None:
        """It is not known whether the last entries arrived."""
        with self._lock:
            self._lose()

    def entries(self) -> list[bytes]:
        """Returns what is to be written now, in order; a sign of life when there was nothing for `BEAT_S`."""
        now = self._clock()
        self.wake.clear()
        with self._lock:
            line, self._line = self._line, []
            missed, self._missed = self._missed, None
            is_resent = self._lost or (self._asked and now >= self._resent_at + RESEND_S)
            live = list(self._live.values()) if is_resent else []
            if self._lost:
                self._number += 1
            if is_resent:
                self._lost = self._asked = False
                self._resent_at = now
                self._states += 1
            self._sent += len(line)
        messages = list(self._changes(line))
        if is_resent:
            messages += self._state(live)
        if missed is not None:
            messages.append(Hello(self.origin, self._number, tuple(sorted(missed))))
        if not messages and now >= self._spoke_at + BEAT_S:
            messages.append(Beat(self.origin, self._number))
        if messages:
            self._spoke_at = now
        return [encode(message) for message in messages]

    def due_s(self) -> float:
        """Returns for how long `entries` has nothing to say if nothing happens, in seconds."""
        due = self._spoke_at + BEAT_S
        with self._lock:
            if self._asked:
                due = min(due, self._resent_at + RESEND_S)
        return max(0.0, due - self._clock())

    def goodbye(self) -> bytes:
        """Returns the last entry."""
        return encode(Gone(self.origin, self._number))

    def counts(self) -> OutboxCounts:
        """Returns the totals."""
        with self._lock:
            return OutboxCounts(self._sent, self._dropped, self._states)

    def _lose(self) -> None:
        """The line is worth nothing. The caller has the lock."""
        self._dropped += len(self._line)
        self._line.clear()
        self._lost = True

    def _changes(self, events: list[BookingEvent]) -> Iterator[RouterMessage]:
        for group in grouped(record_of(event) for event in events):
            self._number += 1
            yield Changes(self.origin, self._number, group)

    def _state(self, live: list[tuple[BookingEvent, bool]]) -> Iterator[RouterMessage]:
        groups = list(grouped(_records(live))) or [()]
        for part, group in enumerate(groups):
            yield State(self.origin, self._number, part, len(groups), group)


def record_of(event: BookingEvent) -> Record:
    """Returns the event as it goes over the wire."""
    if event.kind != "book":
        return (event.kind, event.request_id)
    return (event.kind, event.request_id, event.replica_id, event.owed_tokens, event.ladder)


def event_of(record: Record) -> BookingEvent:
    """Returns the event of a record. Raises ValueError for one that no outbox makes."""
    return BookingEvent(*record)


def _records(live: list[tuple[BookingEvent, bool]]) -> Iterator[Record]:
    for event, has_started in live:
        yield record_of(event)
        if has_started:
            yield ("start", event.request_id)
