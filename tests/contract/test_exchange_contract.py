"""What the log of the routers and their claims must do, whatever they are made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvpool.directory import Cursor, DirectoryUnavailable, LogGap, Space
from kvpool.directory.exchange import Claim, Exchange, ExchangeBounds
from tests.contract.conftest import Backend

OTHERS = [Space("other", "ab" * 16, 16), Space("cluster", "cd" * 16, 16), Space("cluster", "ab" * 16, 32)]
LIFE_S = 60.0
KEY = bytes(range(16))


def start(exchange: Exchange) -> Cursor:
    """A cursor at the end of the log."""
    tip = exchange.tip()
    return Cursor(tip.life, tip.newest)


def test_entries_arrive_in_order_and_once(backend: Backend) -> None:
    writer, reader = backend.exchange(), backend.exchange()
    writer.append([b"before"])
    cursor = start(reader)
    writer.append([b"a", b"", b"\xff\x00"])
    writer.append([b"d"])
    heard = reader.read(cursor, 1.0)
    assert heard.entries == (b"a", b"", b"\xff\x00", b"d")
    assert reader.read(heard.cursor, 0.0) == type(heard)((), heard.cursor)


def test_a_reader_waits_for_the_next(backend: Backend) -> None:
    writer, reader = backend.exchange(), backend.exchange()
    writer.append([b"before"])
    cursor = start(reader)
    timer = threading.Timer(0.03, writer.append, ([b"now"],))
    timer.start()
    heard = reader.read(cursor, 0.25)
    while not heard.entries and timer.is_alive():  # a slow machine
        heard = reader.read(cursor, 0.25)
    timer.join()
    assert (heard.entries or reader.read(cursor, 0.25).entries) == (b"now",)


def test_a_log_that_does_not_exist_begins_under_a_new_life(backend: Backend) -> None:
    writer, reader = backend.exchange(), backend.exchange()
    cursor = start(reader)
    assert cursor == Cursor("", 0)
    assert reader.read(cursor, 0.0).entries == ()
    writer.append([b"a"])
    with pytest.raises(LogGap):
        reader.read(cursor, 0.0)
    assert start(reader).life


def test_what_was_trimmed_shows(backend: Backend) -> None:
    writer, reader = backend.exchange(), backend.exchange()
    writer.append([b"a"])
    cursor = start(reader)
    for _ in range(20):
        writer.append([b"x"] * 10)
    with pytest.raises(LogGap):
        reader.read(cursor, 0.0)
    tip = reader.tip()
    assert tip.newest == 201
    assert tip.newest - tip.oldest <= 60


def test_the_pools_log_and_other_spaces_are_apart(backend: Backend) -> None:
    mine = backend.exchange()
    mine.append([b"a"])
    cursor = start(mine)
    for space in OTHERS:
        backend.exchange(space).append([b"b"])
        assert backend.claims(space).take([Claim(KEY, "other")], LIFE_S) == ["other"]
    backend.append(b"c")
    assert mine.read(cursor, 0.0).entries == ()
    assert backend.claims().take([Claim(KEY, "mine")], LIFE_S) == ["mine"]
    assert backend.reader().pools() == []


def test_a_log_in_which_nobody_speaks_is_forgotten(backend: Backend) -> None:
    exchange = backend.exchange(bounds=ExchangeBounds(40, retention_s=0.05))
    exchange.append([b"a"])
    cursor = start(exchange)
    wait_until(lambda: exchange.tip().life == "")
    with pytest.raises(LogGap):
        exchange.read(cursor, 0.0)
    exchange.append([b"b"])
    assert start(exchange).position == 1


def test_a_crash_and_a_restart(backend: Backend) -> None:
    exchange, claims = backend.exchange(), backend.claims()
    exchange.append([b"a"] * 3)
    claims.take([Claim(KEY, "a")], LIFE_S)
    cursor = start(exchange)
    backend.stop()
    for attempt in (
        lambda: exchange.append([b"b"]),
        exchange.tip,
        lambda: exchange.read(cursor, 0.0),
        lambda: claims.take([Claim(KEY, "b")], LIFE_S),
        lambda: claims.renew([Claim(KEY, "a")], LIFE_S),
        lambda: claims.release([Claim(KEY, "a")]),
    ):
        with pytest.raises(DirectoryUnavailable):
            attempt()
    backend.start()
    with pytest.raises(LogGap):
        exchange.read(cursor, 0.0)
    exchange.append([b"b"] * 3)
    with pytest.raises(LogGap):
        exchange.read(cursor, 0.0)
    assert claims.take([Claim(KEY, "b")], LIFE_S) == ["b"]


def test_old_data_does_not_pass_for_new(backend: Backend) -> None:
    exchange = backend.exchange()
    exchange.append([b"a"])
    backend.save()
    exchange.append([b"b"] * 5)
    cursor = start(exchange)
    backend.stop()
    backend.start()
    with pytest.raises(LogGap):
        exchange.read(cursor, 0.0)


def test_a_pause_is_a_time_out(backend: Backend) -> None:
    exchange, claims = backend.exchange(), backend.claims()
    exchange.append([b"a"])
    cursor = start(exchange)
    backend.pause()
    with pytest.raises(DirectoryUnavailable):
        claims.take([Claim(KEY, "a")], LIFE_S)
    with pytest.raises(DirectoryUnavailable):
        exchange.read(cursor, 0.0)
    backend.resume()
    exchange.append([b"b"])
    assert exchange.read(cursor, 0.0).entries[-1] == b"b"


def test_a_claim_has_one_holder(backend: Backend) -> None:
    one, two = backend.claims(), backend.claims()
    other = bytes(16)
    assert one.take([Claim(KEY, "a")], LIFE_S) == ["a"]
    assert two.take([Claim(KEY, "b"), Claim(other, "b")], LIFE_S) == ["a", "b"]
    assert one.take([Claim(KEY, "a"), Claim(other, "a")], LIFE_S) == ["a", "b"]
    assert one.take([], LIFE_S) == []


def test_only_the_holder_releases_and_renews(backend: Backend) -> None:
    store = backend.claims()
    store.take([Claim(KEY, "a")], LIFE_S)
    store.release([Claim(KEY, "b"), Claim(bytes(16), "b")])
    store.renew([Claim(KEY, "b"), Claim(bytes(16), "b")], 0.001)
    time.sleep(0.005)
    assert store.take([Claim(KEY, "b")], LIFE_S) == ["a"]
    assert store.take([Claim(bytes(16), "c")], LIFE_S) == ["c"]
    store.release([Claim(KEY, "a"), Claim(KEY, "a")])
    assert store.take([Claim(KEY, "b")], LIFE_S) == ["b"]


def test_a_claim_ends_with_its_life(backend: Backend) -> None:
    store = backend.claims()
    store.take([Claim(KEY, "a")], 0.02)
    wait_until(lambda: store.take([Claim(KEY, "b")], LIFE_S) == ["b"])


def test_a_renewed_claim_has_a_new_life(backend: Backend) -> None:
    store = backend.claims()
    store.take([Claim(KEY, "a")], LIFE_S)
    store.renew([Claim(KEY, "a")], 0.02)
    wait_until(lambda: store.take([Claim(KEY, "b")], LIFE_S) == ["b"])
    store.renew([Claim(KEY, "b")], LIFE_S)
    assert store.take([Claim(KEY, "a")], LIFE_S) == ["b"]


def test_of_many_that_ask_at_once_one_gets_it(backend: Backend) -> None:
    stores = [backend.claims() for _ in range(8)]
    begin = threading.Barrier(len(stores))
    answers: list[list[str]] = []

    def ask(number: int) -> None:
        begin.wait()
        keys = [bytes([index]) * 16 for index in range(20)]
        answers.append(stores[number].take([Claim(key, f"holder-{number}") for key in keys], LIFE_S))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == len(stores)
    assert all(answer == answers[0] for answer in answers)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
