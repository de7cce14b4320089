"""Bookings shared between the routers of a space: two threads between a `RouteService` and the routers' log.

    RouteService --announce--> Outbox --Sender--> log --Receiver--> Inbox --apply_remote--> RouteService
                                                                    (of every other router)

The sender writes what there is to tell at most every `PACE_S`, and a sign of life when there is nothing; the receiver waits for
entries and applies them. A request waits for neither. When the log lost entries, or is another one, the receiver forgets what
the others told and asks them again; when it does not answer, both try again with growing pauses, and what the others
told ends with their lease.

Limits: a change is known elsewhere after about the pace and one round trip. `close()` takes up to one read, or a time-out of
the backend.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any, Final

from kvpool.directory.backend import Cursor
from kvpool.directory.errors import DirectoryUnavailable, LogGap
from kvpool.directory.exchange import Exchange
from router.inbox import Inbox, RemoteBookings
from router.outbox import Outbox

_log = logging.getLogger(__name__)
LEASE_S: Final = 3.0
PACE_S: Final = 0.002
ASK_EVERY_S: Final = 0.3
ENTRIES_A_CALL: Final = 16
FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 1.0


def new_origin(rng: random.Random) -> str:
    """Returns a name for one life of a router; give it `random.SystemRandom()`."""
    return f"{rng.getrandbits(64):016x}"


class Sender:
    """Writes what `outbox` has to tell. Not thread-safe."""

    def __init__(self, outbox: Outbox, exchange: Exchange) -> None:
        self._outbox = outbox
        self._exchange = exchange
        self._is_down = False

    def step(self) -> bool:
        """Writes once, if there is something. Returns False when the log did not take it: pause."""
        entries = self._outbox.entries()
        try:
            for start in range(0, len(entries), ENTRIES_A_CALL):
                self._exchange.append(entries[start : start + ENTRIES_A_CALL])
        except DirectoryUnavailable as error:
            if not self._is_down:
                _log.warning("other routers do not hear of this one's bookings: %s", error)
            self._is_down = True
            self._outbox.failed()
            return False
        self._is_down = False
        return True

    def goodbye(self) -> None:
        """Tells that this origin is no more. Raises DirectoryUnavailable."""
        self._exchange.append([self._outbox.goodbye()])


class Receiver:
    """Fills `inbox`, and lets `outbox` ask and answer. Not thread-safe. `clock` gives monotonic seconds."""

    def __init__(self, inbox: Inbox, outbox: Outbox, exchange: Exchange, clock: Callable[[], float]) -> None:
        self.connected = False
        self._inbox = inbox
        self._outbox = outbox
        self._exchange = exchange
        self._clock = clock
        self._cursor: Cursor | None = None
        self._asked_at = clock() - ASK_EVERY_S

    def step(self, timeout_s: float) -> bool:
        """Reads once, waiting up to `timeout_s` for an entry. Returns False when the caller should pause.

        That is when the log did not answer, or had a gap right after a look at where it is.
        """
        has_looked = self._cursor is None
        is_well = True
        try:
            if self._cursor is None:
                tip = self._exchange.tip()
                self._cursor = Cursor(tip.life, tip.newest)
                self._inbox.lost()
                self._outbox.ask(set())
            heard = self._exchange.read(self._cursor, timeout_s)
            self._cursor = heard.cursor
            now = self._clock()
            for entry in heard.entries:
                self._inbox.apply(entry, now)
            self.connected = True
        except LogGap as gap:
            _log.info("asking the other routers for their bookings: %s", gap)
            self._cursor = None
            self._inbox.lost()
            is_well = not has_looked
        except DirectoryUnavailable as error:
            if self.connected:
                _log.warning("this router does not hear of others' bookings: %s", error)
            self.connected = is_well = False
        self._inbox.expire(self._clock())
        self._answer()
        return is_well

    def _answer(self) -> None:
        if self._inbox.is_asked:
            self._inbox.is_asked = False
            self._outbox.asked()
        missing = self._inbox.missing()
        now = self._clock()
        if missing and now >= self._asked_at + ASK_EVERY_S:
            self._asked_at = now
            self._outbox.ask(missing)


class Sharing:
    """Runs both until `close()`, each in a thread with an exchange of its own, which it closes."""

    def __init__(
        self,
        open_exchange: Callable[[], Exchange],
        outbox: Outbox,
        bookings: RemoteBookings,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        lease_s: float = LEASE_S,
        read_s: float = 0.2,
    ) -> None:
        """`outbox` is told of every change of this process's bookings; `clock` is the one it has."""
        self.failure: BaseException | None = None
        self._outbox = outbox
        self._inbox = Inbox(bookings, outbox.origin, lease_s)
        self._exchanges = open_exchange(), open_exchange()
        self._sender = Sender(outbox, self._exchanges[0])
        self._receiver = Receiver(self._inbox, outbox, self._exchanges[1], clock)
        self._rng = rng
        self._read_s = read_s
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work, exchange), name=f"kvatlas-{name}", daemon=True)
            for name, work, exchange in zip(
                ("bookings-out", "bookings-in"), (self._send, self._receive), self._exchanges, strict=True
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def report(self) -> dict[str, Any]:
        """How it stands, ready for JSON: others that are followed, their bookings known here, totals of changes."""
        routers, bookings = self._inbox.known()
        sent, dropped, states = self._outbox.counts()
        told = self._inbox.counts
        return {
            "origin": self._outbox.origin,
            "connected": self.alive and self._receiver.connected,
            "routers": routers,
            "bookings": bookings,
            "sent": sent,
            "received": told["received"],
            "dropped": dropped + told["dropped"],
            "states_sent": states,
            "gaps": told["gaps"],
            "malformed": told["malformed"],
            "expired": told["expired"],
        }

    def close(self) -> None:
        """Stops; the others hear that this router is gone, where the log answers. Idempotent."""
        self._stop.set()
        self._outbox.wake.set()
        for thread in self._threads:
            thread.join(10.0)

    def _send(self) -> None:
        pause_s = FIRST_RETRY_S
        while not self._stop.is_set():
            if self._sender.step():
                pause_s = FIRST_RETRY_S
                self._stop.wait(PACE_S)
                self._outbox.wake.wait(self._outbox.due_s())
            else:
                pause_s = self._rest(pause_s)
        self._sender.goodbye()

    def _receive(self) -> None:
        pause_s = FIRST_RETRY_S
        while not self._stop.is_set():
            if self._receiver.step(self._read_s):
                pause_s = FIRST_RETRY_S
                self._stop.wait(PACE_S)
            else:
                pause_s = self._rest(pause_s)

    def _rest(self, pause_s: float) -> float:
        """Waits about so long; returns the pause after the next failure."""
        self._stop.wait(pause_s * (0.5 + self._rng.random()))
        return min(2 * pause_s, LONGEST_RETRY_S)

    def _run(self, work: Callable[[], None], exchange: Exchange) -> None:
        try:
            work()
        except DirectoryUnavailable as error:  # of the goodbye
            _log.info("the other routers learn from silence that this one is gone: %s", error)
        except BaseException as error:
            self.failure = error
            _log.exception("the bookings are not shared any more")
        finally:
            exchange.close()
