from __future__ import annotations

import pytest

from kvpool.directory.router_messages import Beat, Changes, Gone, Hello, RouterMessage, State, decode
from router.booking_event import BookingEvent, ladder_of
from router.outbox import BEAT_S, RESEND_S, Outbox, event_of, record_of

ORIGIN = "00" * 8
OTHER = "11" * 8


class Post:
    """An outbox in the test's time."""

    def __init__(self, most: int = 4) -> None:
        self.now = 50.0
        self.box = Outbox(ORIGIN, lambda: self.now, most)

    def said(self) -> list[RouterMessage]:
        return [decode(entry) for entry in self.box.entries()]


def book(name: str, owed_tokens: int = 32) -> BookingEvent:
    return BookingEvent("book", name, "replica", owed_tokens, ladder_of(bytes(3 * 16)))


def end(name: str) -> BookingEvent:
    return BookingEvent("release", name)


def test_the_first_words_are_the_whole_state() -> None:
    post = Post()
    post.box.announce(book("a"))
    changes, state = post.said()
    assert changes == Changes(ORIGIN, 1, (record_of(book("a")),))
    assert state == State(ORIGIN, 1, 0, 1, (record_of(book("a")),))
    assert Post().said() == [State(ORIGIN, 0, 0, 1, ())]


def test_changes_are_told_in_order_and_once() -> None:
    post = Post()
    post.said()
    for event in (book("a"), BookingEvent("start", "a"), end("a")):
        post.box.announce(event)
    assert post.said() == [Changes(ORIGIN, 1, tuple(map(record_of, (book("a"), BookingEvent("start", "a"), end("a")))))]
    assert post.said() == []
    assert post.box.counts() == (3, 0, 1)


def test_what_is_not_booked_neither_starts_nor_ends() -> None:
    post = Post()
    post.said()
    post.box.announce(BookingEvent("start", "a"))
    post.box.announce(end("a"))
    assert post.said() == []


def test_a_sign_of_life_when_there_is_nothing_else() -> None:
    post = Post()
    post.said()
    assert post.box.due_s() == pytest.approx(BEAT_S)
    post.now += BEAT_S
    assert post.box.due_s() == 0.0
    assert post.said() == [Beat(ORIGIN, 0)]
    assert post.said() == []


def test_who_asks_gets_the_state_but_not_too_often() -> None:
    post = Post()
    post.said()
    post.box.announce(book("a", 7))
    post.box.announce(BookingEvent("start", "a"))
    post.said()
    post.box.asked()
    assert post.said() == []
    assert post.box.due_s() == pytest.approx(RESEND_S)
    post.now += RESEND_S
    assert post.said() == [State(ORIGIN, 1, 0, 1, (record_of(book("a", 7)), ("start", "a")))]
    assert post.said() == []


def test_changes_go_before_the_state_that_contains_them() -> None:
    post = Post()
    post.said()
    post.now += RESEND_S
    post.box.announce(book("a"))
    post.box.asked()
    changes, state = post.said()
    assert isinstance(changes, Changes)
    assert isinstance(state, State)
    assert changes.number == state.number == 1


def test_a_full_line_is_dropped_and_the_state_goes_out_under_a_number_that_leaves_one_out() -> None:
    post = Post(most=4)
    post.said()
    for index in range(6):
        post.box.announce(book(str(index)))
    (state,) = post.said()
    assert isinstance(state, State)
    assert (state.number, len(state.records)) == (1, 6)
    assert post.box.counts().dropped == 6
    post.box.announce(end("0"))
    assert post.said() == [Changes(ORIGIN, 2, (("release", "0"),))]


def test_after_a_write_that_may_not_have_arrived_the_state_goes_out() -> None:
    post = Post()
    post.said()
    post.box.announce(book("a"))
    post.said()
    post.box.announce(book("b"))
    post.box.failed()
    post.box.announce(end("a"))
    (state,) = post.said()
    assert state == State(ORIGIN, 2, 0, 1, (record_of(book("b")),))
    assert post.box.counts().dropped == 2


def test_a_large_state_comes_in_parts() -> None:
    post = Post(most=10_000)
    post.said()
    for index in range(500):
        post.box.announce(book(str(index)))
    post.said()
    post.now += RESEND_S
    post.box.asked()
    parts = [message for message in post.said() if isinstance(message, State)]
    assert [part.part for part in parts] == list(range(len(parts)))
    assert {part.parts for part in parts} == {len(parts)}
    assert [event_of(record) for part in parts for record in part.records] == [book(str(index)) for index in range(500)]


def test_questions_are_put_once_and_to_everybody_if_need_be() -> None:
    post = Post()
    post.said()
    post.box.ask({OTHER})
    post.box.ask({ORIGIN})
    assert post.said() == [Hello(ORIGIN, 0, (ORIGIN, OTHER))]
    post.box.ask({OTHER})
    post.box.ask(set())
    post.box.ask({ORIGIN})
    assert post.said() == [Hello(ORIGIN, 0)]
    assert post.said() == []


def test_a_change_wakes_the_writer_until_it_has_looked() -> None:
    post = Post()
    assert not post.box.wake.is_set()
    post.box.announce(book("a"))
    assert post.box.wake.is_set()
    post.said()
    assert not post.box.wake.is_set()
    post.box.failed()
    post.box.announce(book("b"))
    assert post.box.wake.is_set()


def test_goodbye() -> None:
    assert decode(Post().box.goodbye()) == Gone(ORIGIN, 0)
