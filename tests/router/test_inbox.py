from __future__ import annotations

import pytest

from kvpool.directory.router_messages import Beat, Changes, Gone, Hello, RouterMessage, State, encode
from router.booking_event import BookingEvent
from router.inbox import Inbox
from router.outbox import record_of
from tests.fakes.remote_bookings import RemoteBookingsFake

ORIGIN, OTHER, OWN = "00" * 8, "11" * 8, "ff" * 8
LEASE_S = 3.0


def book(name: str) -> tuple[object, ...]:
    return record_of(BookingEvent("book", name, "replica", 32, ((1, bytes(16)),)))


class Home:
    """An inbox and what it fills."""

    def __init__(self) -> None:
        self.now = 10.0
        self.bookings = RemoteBookingsFake()
        self.inbox = Inbox(self.bookings, OWN, LEASE_S)

    def hear(self, *messages: RouterMessage) -> Home:
        for message in messages:
            self.inbox.apply(encode(message), self.now)
        return self

    def known(self, origin: str = ORIGIN) -> set[str]:
        return set(self.bookings.of(origin))


def test_nothing_of_an_origin_counts_before_its_state() -> None:
    home = Home().hear(Changes(ORIGIN, 5, (book("a"),)), Beat(ORIGIN, 5))
    assert home.known() == set()
    assert home.inbox.missing() == {ORIGIN}
    home.hear(State(ORIGIN, 6, 0, 1, (book("b"), ("start", "b"))), Changes(ORIGIN, 7, (book("c"),)))
    assert home.known() == {"b", "c"}
    assert home.bookings.of(ORIGIN)["b"][3] is True
    assert home.inbox.missing() == set()
    assert home.inbox.known() == (1, 2)


def test_old_numbers_are_passed_over() -> None:
    home = Home().hear(State(ORIGIN, 1, 0, 1, ()), Changes(ORIGIN, 2, (book("a"),)))
    home.hear(Changes(ORIGIN, 3, (("release", "a"),)), Changes(ORIGIN, 2, (book("a"),)))
    home.hear(State(ORIGIN, 2, 0, 1, (book("a"),)), Beat(ORIGIN, 1), State(ORIGIN, 3, 0, 1, (book("x"),)))
    assert home.known() == set()
    assert home.inbox.known() == (1, 0)
    assert home.inbox.counts["gaps"] == 0


@pytest.mark.parametrize("late", [Changes(ORIGIN, 3, (book("b"),)), Beat(ORIGIN, 2), Hello(ORIGIN, 2)])
def test_a_number_left_out_drops_what_is_known_until_the_state_comes(late: RouterMessage) -> None:
    home = Home().hear(
        State(ORIGIN, 0, 0, 1, ()), State(OTHER, 0, 0, 1, (book("o"),)), Changes(ORIGIN, 1, (book("a"),))
    )
    home.hear(late)
    assert home.known() == set()
    assert home.known(OTHER) == {"o"}
    assert home.inbox.missing() == {ORIGIN}
    assert home.inbox.counts["gaps"] == 1
    home.hear(Changes(ORIGIN, 4, (book("c"),)))
    assert home.known() == set()
    home.hear(State(ORIGIN, 4, 0, 1, (book("b"), book("c"))))
    assert home.known() == {"b", "c"}


def test_a_state_in_parts_counts_when_it_is_whole() -> None:
    parts = [State(ORIGIN, 4, index, 3, (book(str(index)),)) for index in range(3)]
    home = Home().hear(*parts[:2])
    assert home.known() == set()
    home.hear(parts[2])
    assert home.known() == {"0", "1", "2"}


@pytest.mark.parametrize(
    "disturbed",
    [(0, 2, 1), (0, 2), (1, 2), (0, 0, 2), (2, 1, 0)],
    ids=["reordered", "lost", "beginning lost", "begun twice", "backwards"],
)
def test_a_state_with_parts_missing_does_not_count(disturbed: tuple[int, ...]) -> None:
    parts = [State(ORIGIN, 4, index, 3, (book(str(index)),)) for index in range(3)]
    home = Home().hear(*[parts[index] for index in disturbed])
    assert home.known() == set()
    home.hear(*parts)
    assert home.known() == {"0", "1", "2"}


def test_parts_of_two_states_are_not_put_together() -> None:
    home = Home().hear(State(ORIGIN, 4, 0, 2, (book("a"),)), State(ORIGIN, 5, 1, 2, (book("b"),)))
    assert home.known() == set()
    home.hear(State(ORIGIN, 6, 0, 1, (book("c"),)))
    assert home.known() == {"c"}


def test_a_newer_state_takes_the_place_of_what_is_known() -> None:
    home = Home().hear(State(ORIGIN, 1, 0, 1, (book("a"),)), State(ORIGIN, 3, 0, 1, (book("b"),)))
    assert home.known() == {"b"}


def test_silence_longer_than_the_lease_ends_an_origin() -> None:
    home = Home().hear(State(ORIGIN, 1, 0, 1, (book("a"),)), State(OTHER, 1, 0, 1, (book("b"),)))
    home.now += LEASE_S
    home.inbox.expire(home.now)
    assert home.known() == {"a"}
    home.hear(Beat(OTHER, 1))
    home.now += 0.01
    home.inbox.expire(home.now)
    assert home.known() == set()
    assert home.known(OTHER) == {"b"}
    assert home.inbox.known() == (1, 1)
    home.hear(Changes(ORIGIN, 2, (book("c"),)))  # it was only stopped
    assert home.known() == set()
    assert home.inbox.missing() == {ORIGIN}


def test_goodbye_ends_an_origin_at_once() -> None:
    home = Home().hear(State(ORIGIN, 1, 0, 1, (book("a"),)), Gone(ORIGIN, 1), Gone(OTHER, 0))
    assert home.known() == set()
    assert home.inbox.known() == (0, 0)
    assert home.inbox.counts["dropped"] == 1


def test_a_log_with_a_gap_ends_what_all_told() -> None:
    home = Home().hear(State(ORIGIN, 1, 0, 1, (book("a"),)), State(OTHER, 1, 0, 1, (book("b"),)))
    home.inbox.lost()
    assert home.known() == home.known(OTHER) == set()
    assert home.inbox.missing() == {ORIGIN, OTHER}


def test_its_own_words_are_passed_over() -> None:
    home = Home().hear(State(OWN, 1, 0, 1, (book("a"),)), Hello(OWN, 1))
    assert home.bookings.known == {}
    assert not home.inbox.is_asked
    assert home.inbox.missing() == set()


@pytest.mark.parametrize(("wanted", "is_asked"), [((), True), ((OWN, OTHER), True), ((OTHER,), False)])
def test_who_is_asked_answers(wanted: tuple[str, ...], is_asked: bool) -> None:
    assert Home().hear(Hello(ORIGIN, 0, wanted)).inbox.is_asked is is_asked


@pytest.mark.parametrize(
    "record",
    [("book", "b"), ("end", "b"), ("book", "b", "r", -1, ()), ("book", "b", "r", 1, ((1, b"short"),)), (["x"], 1)],
)
def test_a_malformed_booking_is_none_and_shows_as_a_gap(record: tuple[object, ...]) -> None:
    home = Home().hear(State(ORIGIN, 0, 0, 1, ()), Changes(ORIGIN, 1, (book("a"), record)))
    assert home.known() == set()
    assert home.inbox.counts["malformed"] == 1
    home.hear(Beat(ORIGIN, 1))
    assert home.inbox.missing() == {ORIGIN}
    home.hear(State(ORIGIN, 1, 0, 1, (record,)))
    assert home.inbox.missing() == {ORIGIN}
    home.hear(State(ORIGIN, 1, 0, 1, (book("a"),)))
    assert home.known() == {"a"}


def test_bytes_that_are_no_message_are_counted() -> None:
    home = Home()
    home.inbox.apply(b"\x00", home.now)
    assert home.inbox.counts["malformed"] == 1
