"""Bookings against a plain list of what is in flight."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.bookings import SETTLE_S, Bookings

REPLICAS = ("a", "b")
REQUESTS = tuple(f"q{number}" for number in range(6))


def chain(path: tuple[int, ...]) -> tuple[bytes, ...]:
    """Keys of a prompt whose blocks are `path`: each depends on all before it, like real ones."""
    return tuple(bytes(path[: end + 1]) for end in range(len(path)))


@dataclass
class Known:
    replica_id: str
    prompt_tokens: int
    uncached_tokens: int
    path: tuple[int, ...]
    accepted_at: float | None = None
    started: bool = False


class Machine(RuleBasedStateMachine):
    """Time only goes on; reports only grow newer, as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.bookings = Bookings()
        self.known: dict[str, Known] = {}
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
        self.known[request] = Known(replica, tokens, max(0, tokens - cached), path)

    @rule(request=st.sampled_from(REQUESTS), replica=st.sampled_from(REPLICAS), cached=st.integers(0, 100))
    def move(self, request: str, replica: str, cached: int) -> None:
        self.bookings.move(request, replica, cached, self.now)
        known = self.known.get(request)
        if known is None:
            return
        if known.replica_id != replica:
            known.replica_id, known.accepted_at, known.started = replica, None, False
        known.accepted_at = self.now if known.accepted_at is None else known.accepted_at
        known.uncached_tokens = max(0, known.prompt_tokens - cached)

    @rule(request=st.sampled_from(REQUESTS))
    def start(self, request: str) -> None:
        self.bookings.start(request)
        if request in self.known:
            self.known[request].started = True

    @rule(request=st.sampled_from(REQUESTS))
    def release(self, request: str) -> None:
        self.bookings.release(request)
        self.known.pop(request, None)

    @rule(replica=st.sampled_from(REPLICAS))
    def drop(self, replica: str) -> None:
        self.bookings.drop_replica(replica)
        self.known = {name: one for name, one in self.known.items() if one.replica_id != replica}

    @rule(kept=st.sets(st.sampled_from(REPLICAS), min_size=1))
    def keep(self, kept: set[str]) -> None:
        self.bookings.keep_replicas(sorted(kept))
        self.known = {name: one for name, one in self.known.items() if one.replica_id in kept}

    @rule(passed=st.sampled_from([0.01, SETTLE_S / 2, SETTLE_S, 1.0]))
    def wait(self, passed: float) -> None:
        self.now += passed

    @rule(replica=st.sampled_from(REPLICAS))
    def report(self, replica: str) -> None:
        self.reported_at[replica] = self.now

    @precondition(lambda self: self.known)
    @rule()
    def end_everything(self) -> None:
        for request in list(self.known):
            self.release(request)
        assert len(self.bookings) == 0
        assert self.bookings.load(REPLICAS, [None] * 2) == [(0, 0)] * 2
        assert self.bookings.promised_blocks(REPLICAS, chain((0, 0))) == [0, 0]

    @invariant()
    def sums_are_those_of_the_list(self) -> None:
        for reported in (False, True):
            at = [self.reported_at[replica] if reported else None for replica in REPLICAS]
            assert self.bookings.load(REPLICAS, at) == [
                self._load(replica, when) for replica, when in zip(REPLICAS, at, strict=True)
            ]
        assert len(self.bookings) == len(self.known)
        for replica in REPLICAS:
            assert self.bookings.requests(replica) == sum(one.replica_id == replica for one in self.known.values())
        for request in REQUESTS:
            assert (request in self.bookings) == (request in self.known)

    @invariant()
    def promised_is_the_longest_common_prefix(self) -> None:
        for asked in ((), (0,), (0, 1, 0, 1, 0, 1), (1, 1, 1)):
            wanted = [
                max([_common(asked, one.path) for one in self.known.values() if one.replica_id == replica], default=0)
                for replica in REPLICAS
            ]
            assert self.bookings.promised_blocks(REPLICAS, chain(asked)) == wanted

    def _load(self, replica: str, reported_at: float | None) -> tuple[int, int]:
        counted = [
            one
            for one in self.known.values()
            if one.replica_id == replica
            and (reported_at is None or one.accepted_at is None or one.accepted_at > reported_at - SETTLE_S)
        ]
        return sum(0 if one.started else one.uncached_tokens for one in counted), len(counted)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40)


def test_a_report_contains_what_was_accepted_long_enough_before_it() -> None:
    bookings = Bookings()
    bookings.book("q", "a", 100, 40, chain((1, 2)), 10.0)
    assert bookings.load(["a"], [99.0]) == [(60, 1)]  # not accepted: no report can contain it
    bookings.move("q", "a", 40, 10.5)
    assert bookings.load(["a"], [10.5 + 0.9 * SETTLE_S]) == [(60, 1)]
    assert bookings.load(["a"], [10.51 + SETTLE_S]) == [(0, 0)]
    assert bookings.load(["a"], [None]) == [(60, 1)]


def test_a_started_request_owes_no_prompt_tokens_but_decodes() -> None:
    bookings = Bookings()
    bookings.book("q", "a", 100, 0, (), 10.0)
    bookings.start("q")
    bookings.start("q")
    assert bookings.load(["a"], [None]) == [(0, 1)]
    bookings.move("q", "a", 50, 11.0)
    assert bookings.load(["a"], [None]) == [(0, 1)]


def test_a_promise_ends_with_its_last_request() -> None:
    bookings = Bookings()
    for request, path in (("one", (1, 2)), ("same", (1, 2, 3)), ("other", (7,))):
        bookings.book(request, "a", 48, 0, chain(path), 10.0)
    promised = []
    for request in ("same", "one", "other"):
        promised.append(bookings.promised_blocks(["a"], chain((1, 2, 3))))
        bookings.release(request)
    assert promised == [[3], [2], [0]]
    assert bookings.promised_blocks(["a"], chain((7,))) == [0]
