"""Bookings, of this process and of other routers, against a plain list of what is in flight."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.booking_event import ladder_of
from router.booking_table import Roll
from router.bookings import HEARD_S, LINGER_S, REMOTE_LIFE_S, SETTLE_S, Bookings

REPLICAS = ("a", "b")
REQUESTS = tuple(f"q{number}" for number in range(6))
ORIGINS = ("there", "elsewhere")


def chain(path: tuple[int, ...]) -> bytes:
    """Packed keys of a prompt whose blocks are `path`: each depends on all before it, like real ones."""
    return b"".join(hashlib.blake2b(bytes(path[: end + 1]), digest_size=16).digest() for end in range(len(path)))


def load(bookings: Bookings, replica_ids: Sequence[str], reported_at: Sequence[float | None]) -> list[tuple[int, int]]:
    """Of each replica: tokens and requests beyond its report."""
    since = np.array([-math.inf if at is None else at for at in reported_at])
    _, tokens, requests = bookings.survey(Roll(replica_ids), since, b"", np.zeros(len(replica_ids), np.int64))
    return list(zip(tokens.tolist(), requests.tolist(), strict=True))


def promised(bookings: Bookings, replica_ids: Sequence[str], keys: bytes, known: int = 0) -> list[int]:
    """Of each replica: leading blocks promised, where `known` are known."""
    before = np.full(len(replica_ids), known, np.int64)
    blocks, _, _ = bookings.survey(Roll(replica_ids), np.full(len(replica_ids), -math.inf), keys, before)
    assert before.tolist() == [known] * len(replica_ids)
    found: list[int] = blocks.tolist()
    return found


@dataclass
class Known:
    replica_id: str
    prompt_tokens: int
    uncached_tokens: int
    path: tuple[int, ...]
    accepted_at: float | None = None
    started: bool = False
    booked_at: float = 0.0

    @property
    def owed_tokens(self) -> int:
        return 0 if self.started else self.uncached_tokens


class Machine(RuleBasedStateMachine):
    """Time only goes on; reports only grow newer, as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.bookings = Bookings()
        self.known: dict[str, Known] = {}
        self.remote: dict[tuple[str, str], Known] = {}
        self.over: list[tuple[float, Known, bool]] = []
        self.now = 10.0
        self.reported_at: dict[str, float | None] = dict.fromkeys(REPLICAS)

    @rule(
        request=st.sampled_from(REQUESTS),
        replica=st.sampled_from(REPLICAS),
        path=st.lists(st.integers(0, 1), max_size=5).map(tuple),
        cached=st.integers(0, 100),
        extra=st.integers(0, 15),
    )
    def book(self, request: str, replica: str, path: tuple[int, ...], cached: int, extra: int) -> None:
        tokens = 16 * len(path) + extra
        self.bookings.book(request, replica, tokens, cached, chain(path), self.now)
        self.known[request] = Known(replica, tokens, max(0, tokens - cached), path, booked_at=self.now)

    @rule(request=st.sampled_from(REQUESTS), replica=st.sampled_from(REPLICAS), cached=st.integers(0, 100))
    def move(self, request: str, replica: str, cached: int) -> None:
        told = self.bookings.move(request, replica, cached, self.now)
        known = self.known.get(request)
        if known is None:
            assert not told
            return
        before = (known.replica_id, known.owed_tokens)
        if known.replica_id != replica:
            known.replica_id, known.accepted_at, known.started = replica, None, False
        if known.accepted_at is None:
            known.accepted_at = max(known.booked_at, self.now - HEARD_S)
        known.uncached_tokens = max(0, known.prompt_tokens - cached)
        assert told == (before != (replica, known.owed_tokens))

    @rule(request=st.sampled_from(REQUESTS))
    def start(self, request: str) -> None:
        known = self.known.get(request)
        assert self.bookings.start(request, self.now) == (known is not None and not known.started)
        if known is not None:
            known.started = True

    @rule(request=st.sampled_from(REQUESTS))
    def release(self, request: str) -> None:
        assert self.bookings.release(request) == (request in self.known)
        self.known.pop(request, None)

    @rule(request=st.sampled_from(REQUESTS))
    def finish(self, request: str) -> None:
        assert self.bookings.finish(request, self.now) == (request in self.known)
        self._end(self.known.pop(request, None), is_remote=False)

    @rule(origin=st.sampled_from(ORIGINS), request=st.sampled_from(REQUESTS))
    def finish_remote(self, origin: str, request: str) -> None:
        self.bookings.finish_remote(origin, request, self.now)
        self._end(self.remote.pop((origin, request), None), is_remote=True)

    def _end(self, known: Known | None, is_remote: bool) -> None:
        if known is not None:
            self._forget()
            if known.started:
                self.over.append((self.now, known, is_remote))

    def _forget(self) -> None:
        self.over = [one for one in self.over if one[0] > self.now - LINGER_S]

    @rule(replica=st.sampled_from(REPLICAS))
    def drop(self, replica: str) -> None:
        self.over = [one for one in self.over if one[1].replica_id != replica]
        lost = {name for name, one in self.known.items() if one.replica_id == replica}
        assert set(self.bookings.drop_replica(replica)) == lost
        self.known = {name: one for name, one in self.known.items() if name not in lost}
        self.remote = {name: one for name, one in self.remote.items() if one.replica_id != replica}

    @rule(kept=st.sets(st.sampled_from(REPLICAS), min_size=1))
    def keep(self, kept: set[str]) -> None:
        lost = {name for name, one in self.known.items() if one.replica_id not in kept}
        assert set(self.bookings.keep_replicas(sorted(kept))) == lost
        self.known = {name: one for name, one in self.known.items() if name not in lost}

    @rule(
        origin=st.sampled_from(ORIGINS),
        request=st.sampled_from(REQUESTS),
        replica=st.sampled_from(REPLICAS),
        path=st.lists(st.integers(0, 1), max_size=9).map(tuple),
        owed=st.integers(0, 100),
    )
    def book_remote(self, origin: str, request: str, replica: str, path: tuple[int, ...], owed: int) -> None:
        self.bookings.book_remote(origin, request, replica, owed, ladder_of(chain(path)), self.now)
        self.remote.pop((origin, request), None)
        self.remote[origin, request] = Known(replica, owed, owed, path, accepted_at=self.now)

    @rule(origin=st.sampled_from(ORIGINS), request=st.sampled_from(REQUESTS))
    def start_remote(self, origin: str, request: str) -> None:
        self.bookings.start_remote(origin, request, self.now)
        if (origin, request) in self.remote:
            self.remote[origin, request].started = True

    @rule(origin=st.sampled_from(ORIGINS), request=st.sampled_from(REQUESTS))
    def release_remote(self, origin: str, request: str) -> None:
        self.bookings.release_remote(origin, request)
        self.remote.pop((origin, request), None)

    @rule(origin=st.sampled_from(ORIGINS))
    def drop_origin(self, origin: str) -> None:
        self.bookings.drop_origin(origin)
        self.remote = {name: one for name, one in self.remote.items() if name[0] != origin}

    @rule(passed=st.sampled_from([0.01, LINGER_S, SETTLE_S / 2, SETTLE_S, 1.0, REMOTE_LIFE_S / 2]))
    def wait(self, passed: float) -> None:
        self.now += passed

    @rule()
    def tidy(self) -> None:
        self.bookings.tidy(self.now)
        self._forget()
        self.remote = {
            name: one
            for name, one in self.remote.items()
            if one.accepted_at is not None and self.now - one.accepted_at <= REMOTE_LIFE_S
        }

    @rule(replica=st.sampled_from(REPLICAS))
    def report(self, replica: str) -> None:
        self.reported_at[replica] = self.now

    @precondition(lambda self: self.known)
    @rule()
    def end_everything(self) -> None:
        for request in list(self.known):
            self.release(request)
        for origin in ORIGINS:
            self.drop_origin(origin)
        assert (len(self.bookings), self.bookings.remote) == (0, 0)
        self.now += LINGER_S
        self.bookings.tidy(self.now)
        self.over = []
        assert load(self.bookings, REPLICAS, [None] * 2) == [(0, 0)] * 2
        assert promised(self.bookings, REPLICAS, chain((0, 0))) == [0, 0]

    @invariant()
    def sums_are_those_of_the_list(self) -> None:
        for reported in (False, True):
            at = [self.reported_at[replica] if reported else None for replica in REPLICAS]
            assert load(self.bookings, REPLICAS, at) == [
                self._load(replica, when) for replica, when in zip(REPLICAS, at, strict=True)
            ]
        assert (len(self.bookings), self.bookings.remote) == (len(self.known), len(self.remote))
        for replica in REPLICAS:
            assert self.bookings.requests(replica) == sum(one.replica_id == replica for one in self.known.values())
        for request in REQUESTS:
            assert (request in self.bookings) == (request in self.known)
            far = any((origin, request) in self.remote for origin in ORIGINS)
            assert self.bookings.knows(request) == (request in self.known or far)

    @invariant()
    def promised_is_the_longest_common_prefix(self) -> None:
        for asked in ((), (0,), (0, 1, 0, 1, 0, 1), (1, 1, 1), (0,) * 9):
            for known in (0, 1, 3):
                wanted = [
                    max(
                        [known]
                        + [_common(asked, one.path) for one in self.known.values() if one.replica_id == replica]
                        + [_climbed(asked, one.path) for one in self.remote.values() if one.replica_id == replica]
                        + [
                            (_climbed if is_remote else _common)(asked, one.path)
                            for _, one, is_remote in self.over
                            if one.replica_id == replica
                        ]
                    )
                    for replica in REPLICAS
                ]
                assert promised(self.bookings, REPLICAS, chain(asked), known) == wanted

    def _load(self, replica: str, reported_at: float | None) -> tuple[int, int]:
        counted = [
            one
            for one in [*self.known.values(), *self.remote.values()]
            if one.replica_id == replica
            and (reported_at is None or one.accepted_at is None or one.accepted_at > reported_at - SETTLE_S)
        ]
        return sum(one.owed_tokens for one in counted), len(counted)


def _climbed(asked: tuple[int, ...], path: tuple[int, ...]) -> int:
    """What is known to be common when only the keys after 1, 2, 4, ... blocks of `path`, and its last one, are."""
    common = _common(asked, path)
    return common if common == len(path) else 1 << common.bit_length() - 1 if common else 0


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_a_report_contains_what_was_accepted_long_enough_before_it() -> None:
    bookings = Bookings()
    bookings.book("q", "a", 100, 40, chain((1, 2)), 10.0)
    assert load(bookings, ["a"], [99.0]) == [(60, 1)]  # not accepted: no report can contain it
    bookings.move("q", "a", 40, 10.5)
    assert load(bookings, ["a"], [10.5 - HEARD_S + 0.9 * SETTLE_S]) == [(60, 1)]
    assert load(bookings, ["a"], [10.5 - HEARD_S + 1.1 * SETTLE_S]) == [(0, 0)]
    assert load(bookings, ["a"], [None]) == [(60, 1)]


def test_a_started_request_owes_no_prompt_tokens_but_decodes() -> None:
    bookings = Bookings()
    bookings.book("q", "a", 100, 0, b"", 10.0)
    bookings.start("q", 10.5)
    bookings.start("q", 10.6)
    assert load(bookings, ["a"], [None]) == [(0, 1)]
    bookings.move("q", "a", 50, 11.0)
    assert load(bookings, ["a"], [None]) == [(0, 1)]


def test_a_promise_ends_with_the_last_request_that_computes_it() -> None:
    bookings = Bookings()
    for request, path in (("one", (1, 2)), ("same", (1, 2, 3)), ("other", (7,))):
        bookings.book(request, "a", 48, 0, chain(path), 10.0)
    found = []
    for request in ("same", "one", "other"):
        found.append(promised(bookings, ["a"], chain((1, 2, 3))))
        bookings.release(request)
    assert found == [[3], [2], [0]]
    assert promised(bookings, ["a"], chain((7,))) == [0]


def test_what_was_computed_is_promised_a_little_longer_and_counts_for_nothing() -> None:
    bookings = Bookings()
    for request in ("computed", "left"):
        bookings.book(request, "a", 48, 0, chain((1, 2, 3) if request == "computed" else (7,)), 10.0)
        bookings.move(request, "a", 0, 10.0)
    bookings.start("computed", 10.1)
    assert bookings.finish("computed", 10.2)
    assert bookings.finish("left", 10.2)
    assert not bookings.finish("computed", 10.3)
    assert (len(bookings), bookings.remote, bookings.knows("computed")) == (0, 0, False)
    assert load(bookings, ["a"], [None]) == [(0, 0)]
    assert promised(bookings, ["a"], chain((1, 2, 3))) == [3]
    assert promised(bookings, ["a"], chain((7,))) == [0]  # it left before that was computed
    bookings.tidy(10.19 + LINGER_S)
    assert promised(bookings, ["a"], chain((1, 2, 3))) == [3]
    bookings.tidy(10.21 + LINGER_S)
    assert promised(bookings, ["a"], chain((1, 2, 3))) == [0]


def test_a_replica_that_died_holds_nothing_of_what_it_computed() -> None:
    bookings = Bookings()
    bookings.book("q", "a", 48, 0, chain((1, 2, 3)), 10.0)
    bookings.start("q", 10.1)
    bookings.finish("q", 10.2)
    bookings.drop_replica("a")
    assert bookings.reach(chain((1, 2, 3)), 0) == 0


def test_what_has_ended_does_not_grow() -> None:
    bookings = Bookings()
    for number in range(10_000):
        bookings.book("q", "a", 48, 0, chain((1, 2, 3)), number / 100)
        bookings.start("q", number / 100)
        bookings.finish("q", number / 100)
    assert len(bookings._table.bookings) <= 100 * LINGER_S + 1


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7, 8, 9, 100])
def test_a_ladder_that_is_whole_promises_all_and_else_at_least_half(blocks: int) -> None:
    bookings = Bookings()
    path = tuple(number % 251 for number in range(blocks))
    bookings.book_remote("there", "q", "a", 5, ladder_of(chain(path)), 10.0)
    assert promised(bookings, ["a"], chain((*path, 9, 9))) == [blocks]
    for shared in range(blocks):
        (found,) = promised(bookings, ["a"], chain((*path[:shared], 252, 252)))
        assert shared / 2 <= found <= shared


def test_remote_bookings_do_not_outlive_whoever_made_them() -> None:
    bookings = Bookings()
    bookings.book_remote("there", "old", "a", 7, (), 10.0)
    bookings.book_remote("there", "renewed", "a", 7, (), 10.0)
    bookings.book("mine", "a", 100, 0, b"", 10.0)
    bookings.book_remote("there", "renewed", "a", 5, (), 11.0)
    bookings.tidy(10.5 + REMOTE_LIFE_S)
    assert (bookings.knows("old"), bookings.knows("renewed"), bookings.knows("mine")) == (False, True, True)
    assert load(bookings, ["a"], [None]) == [(105, 2)]


def test_two_routers_may_use_one_request_id() -> None:
    bookings = Bookings()
    bookings.book("q", "a", 100, 0, b"", 10.0)
    for origin, owed in (("there", 10), ("elsewhere", 1)):
        bookings.book_remote(origin, "q", "a", owed, (), 10.0)
    bookings.start_remote("there", "q", 10.5)
    assert load(bookings, ["a"], [None]) == [(101, 3)]
    bookings.release("q")
    bookings.release_remote("elsewhere", "q")
    assert load(bookings, ["a"], [None]) == [(0, 1)]
    assert bookings.knows("q")
