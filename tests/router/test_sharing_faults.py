"""Three routers over a log that loses, repeats and reorders.

What one knows of another was true at the moment it was said, and in the end all agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.directory.router_messages import decode
from router.booking_event import BookingEvent, ladder_of
from router.inbox import Inbox
from router.outbox import Outbox
from router.sharing import ASK_EVERY_S
from tests.fakes.remote_bookings import Known, RemoteBookingsFake, change

ROUTERS = st.integers(0, 2)
REQUESTS = st.sampled_from(["a", "b", "c", "d"])
LEASE_S = 3.0


@dataclass
class Router:
    """One router; `mail` is what the log holds for it."""

    box: Outbox
    bookings: RemoteBookingsFake
    inbox: Inbox
    mail: list[bytes] = field(default_factory=list)
    own: dict[str, Known] = field(default_factory=dict)
    history: dict[int, dict[str, Known]] = field(default_factory=dict)
    """What it had when it said so many changes."""


class Faults(RuleBasedStateMachine):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.lives = 0
        self.routers = [self.born() for _ in range(3)]

    def born(self) -> Router:
        self.lives += 1
        box = Outbox(f"{self.lives:016x}", lambda: self.now, most=3)
        bookings = RemoteBookingsFake()
        return Router(box, bookings, Inbox(bookings, box.origin, LEASE_S))

    def flush(self, router: Router, written: int | None = None) -> None:
        """Writes what the router has to tell; only the first `written` entries get there, and it knows of a failure."""
        entries = router.box.entries()
        for entry in entries:
            message = decode(entry)
            router.history[message.number] = dict(router.own)
        arrived = entries if written is None else entries[:written]
        for each in self.routers:
            each.mail += arrived
        if written is not None:
            router.box.failed()

    def receive(self, router: Router, entries: list[bytes]) -> None:
        for entry in entries:
            router.inbox.apply(entry, self.now)
        if router.inbox.is_asked:
            router.inbox.is_asked = False
            router.box.asked()

    @rule(which=ROUTERS, request=REQUESTS, replica=st.sampled_from(["x", "y"]), blocks=st.integers(0, 5))
    def book(self, which: int, request: str, replica: str, blocks: int) -> None:
        self.tell(which, BookingEvent("book", request, replica, 16 * blocks, ladder_of(bytes(16 * blocks))))

    @rule(which=ROUTERS, request=REQUESTS)
    def start(self, which: int, request: str) -> None:
        self.tell(which, BookingEvent("start", request))

    @rule(which=ROUTERS, request=REQUESTS)
    def release(self, which: int, request: str) -> None:
        self.tell(which, BookingEvent("release", request))

    def tell(self, which: int, event: BookingEvent) -> None:
        router = self.routers[which]
        change(router.own, event)
        router.box.announce(event)

    @rule(which=ROUTERS)
    def write(self, which: int) -> None:
        self.flush(self.routers[which])

    @rule(which=ROUTERS, written=st.integers(0, 3))
    def write_without_an_answer(self, which: int, written: int) -> None:
        self.flush(self.routers[which], written)

    @rule(which=ROUTERS)
    def read(self, which: int) -> None:
        router = self.routers[which]
        mail, router.mail = router.mail, []
        self.receive(router, mail)

    @rule(which=ROUTERS, data=st.data())
    def lose(self, which: int, data: Any) -> None:
        mail = self.routers[which].mail
        if mail:
            del mail[data.draw(st.integers(0, len(mail) - 1))]

    @rule(which=ROUTERS, data=st.data())
    def repeat(self, which: int, data: Any) -> None:
        mail = self.routers[which].mail
        if mail:
            mail.insert(data.draw(st.integers(0, len(mail))), mail[data.draw(st.integers(0, len(mail) - 1))])

    @rule(which=ROUTERS, data=st.data())
    def reorder(self, which: int, data: Any) -> None:
        router = self.routers[which]
        router.mail = data.draw(st.permutations(router.mail))

    @rule(which=ROUTERS)
    def miss_the_log(self, which: int) -> None:
        router = self.routers[which]
        router.mail.clear()
        router.inbox.lost()
        router.box.ask(set())

    @rule(which=ROUTERS)
    def restart(self, which: int) -> None:
        self.routers[which] = self.born()

    @rule(seconds=st.sampled_from([0.05, 0.5, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for router in self.routers:
            router.inbox.expire(self.now)

    @invariant()
    def what_is_known_was_true_when_it_was_said(self) -> None:
        living = {router.box.origin: router for router in self.routers}
        for router in self.routers:
            for name, origin in router.inbox._origins.items():
                known = router.bookings.of(name)
                assert set(known) == origin.requests
                if origin.number is None:
                    assert known == {}
                elif name in living:
                    assert known == living[name].history[origin.number]

    def teardown(self) -> None:
        """The log is whole again; after a few seconds all agree."""
        for _ in range(int((LEASE_S + 1) / (ASK_EVERY_S / 2)) + 1):
            self.now += ASK_EVERY_S / 2
            for router in self.routers:
                self.flush(router)
            for router in self.routers:
                mail, router.mail = router.mail, []
                self.receive(router, mail)
                router.inbox.expire(self.now)
                missing = router.inbox.missing()
                if missing:
                    router.box.ask(missing)
        for router in self.routers:
            others = {one.box.origin: one.own for one in self.routers if one is not router}
            assert {name: router.bookings.of(name) for name in others} == others
            assert set(router.bookings.known) <= set(others)
            assert router.inbox.known() == (2, sum(len(own) for own in others.values()))


Faults.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
test_faults = Faults.TestCase
