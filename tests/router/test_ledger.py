"""Who hears of a change of a booking; the arithmetic is that of bookings."""

from __future__ import annotations

import math
import threading

import numpy as np

from router.booking_event import BookingEvent
from router.booking_table import Roll
from router.ledger import Ledger
from tests.fakes.speaker import packed


def test_a_withdrawn_booking_is_told_of_only_when_nothing_takes_its_place() -> None:
    told: list[BookingEvent] = []
    ledger = Ledger(told.append)
    assert not ledger.withdraw("q")
    ledger.book("q", "a", 100, 0, b"", 1.0)
    assert ledger.withdraw("q")
    ledger.book("q", "b", 100, 0, b"", 1.0)
    ledger.confirm_withdrawn("q")
    assert [(event.kind, event.replica_id) for event in told] == [("book", "a"), ("book", "b")]
    assert ledger.withdraw("q")
    ledger.confirm_withdrawn("q")
    assert told[2:] == [BookingEvent("release", "q")]


def test_what_changes_nothing_is_not_told() -> None:
    told: list[BookingEvent] = []
    ledger = Ledger(told.append)
    ledger.release("q")
    ledger.finish("q", 1.0)
    ledger.start("q", 1.0)
    ledger.drop_replica("a")
    ledger.keep_replicas([])
    ledger.book("q", "a", 100, 20, b"", 1.0)
    ledger.accept("q", "a", 100, 20, b"", 1.0)
    ledger.start("q", 1.0)
    ledger.start("q", 1.0)
    ledger.accept("q", "a", 100, 40, b"", 1.0)  # it owes nothing any more
    assert [event.kind for event in told] == ["book", "start"]


def test_a_request_that_nobody_booked_is_booked_when_it_is_accepted() -> None:
    told: list[BookingEvent] = []
    ledger = Ledger(told.append)
    ledger.accept("q", "a", 100, 20, packed([1]), 1.0)
    assert told == [BookingEvent("book", "q", "a", 80, ((1, packed([1])),))]
    assert ledger.counts() == (1, 0)


def test_what_others_told_is_not_told_on() -> None:
    told: list[BookingEvent] = []
    ledger = Ledger(told.append)
    for kind in ("book", "start", "release", "book"):
        ledger.apply_remote("there", BookingEvent(kind, "q", "a" if kind == "book" else ""), 1.0)
    assert ledger.counts() == (0, 1)
    ledger.drop_replica("a")
    assert (ledger.counts(), told) == ((0, 0), [])


def test_a_failing_listener_is_complained_of_and_the_booking_stands() -> None:
    complaints: list[str] = []

    def fail(event: BookingEvent) -> None:
        raise RuntimeError("on purpose")

    ledger = Ledger(fail, complaints.append)
    ledger.book("q", "a", 100, 0, b"", 1.0)
    assert (ledger.counts(), len(complaints)) == ((1, 0), 1)
    assert ledger.requests("a") == 1


def test_threads_leave_sums_at_zero_and_tell_in_order() -> None:
    told: list[BookingEvent] = []
    ledger = Ledger(told.append)

    def work(name: str) -> None:
        for number in range(200):
            request_id = f"{name}{number % 3}"
            ledger.book(request_id, "a", 10, 0, packed([number % 2, 7]), 1.0)
            ledger.reach(packed([1, 7]), 0)
            ledger.start(request_id, 1.0)
            ledger.finish(request_id, 1.0)

    threads = [threading.Thread(target=work, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, tokens, requests = ledger.survey(Roll(("a",)), np.array([-math.inf]), b"", np.zeros(1, np.int64))
    assert (tokens.tolist(), requests.tolist(), ledger.counts()) == ([0], [0], (0, 0))
    for name in "xyz":
        kinds = [event.kind for event in told if event.request_id.startswith(name)]
        assert kinds == ["book", "start", "release"] * 200
