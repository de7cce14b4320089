"""Any order of calls of up to three processes on one region: they attach, end, are killed and reclaimed, and share
what they compute. The real pool and its twin do the same; `twin/traffic.py` has what is done and what must hold.

The processes live in this one, each over an attachment of its own, and a killed one loses its locks without cleaning
up. They take turns, so this finds wrong rules, not lost races. Which leaf a process evicts first is exact only as far
as it knows what the others evicted, so here the twin evicts what the real pool did, if those were leaves.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.kvpool.twin.sides import Clock, RealSide, TwinSide
from tests.kvpool.twin.traffic import Client, Request, Traffic

MOST_CLIENTS: Final = 3
letters = st.integers(0, 1)
prompts = st.lists(letters, min_size=1, max_size=8)
tails = st.lists(letters, min_size=1, max_size=4)
which = st.integers(0, 12)


def in_work(machine: SharedMachine) -> bool:
    return bool(machine.traffic.open_requests())


class SharedMachine(RuleBasedStateMachine):
    """Rules name a process or a request by number; the number is taken modulo those that live or are open."""

    @initialize(capacity=st.integers(6, 20), size=st.integers(1, 3), clients=st.integers(2, MOST_CLIENTS))
    def start(self, capacity: int, size: int, clients: int) -> None:
        clock = Clock()
        self.capacity = capacity
        self.directory = tempfile.TemporaryDirectory()
        real = RealSide(Path(self.directory.name), capacity, size, clock)
        twin = TwinSide(capacity, size, clock, exact_order=False)
        self.traffic = Traffic([real, twin], clock, size)
        for _ in range(clients):
            self.traffic.attach()

    def client(self, number: int) -> Client:
        return self.traffic.clients[number % len(self.traffic.clients)]

    def request(self, number: int) -> Request:
        open_requests = self.traffic.open_requests()
        return open_requests[number % len(open_requests)]

    @precondition(lambda self: len(self.traffic.clients) < MOST_CLIENTS)
    @rule()
    def attach(self) -> None:
        self.traffic.attach()

    @precondition(lambda self: len(self.traffic.clients) > 1)
    @rule(client=which, how=st.sampled_from(["end", "die", "die"]))
    def end(self, client: int, how: str) -> None:
        if how == "end":
            self.traffic.detach(self.client(client))
        else:
            self.traffic.kill(self.client(client))

    @rule(client=which, tokens=prompts, check_tokens=st.booleans(), sealed=which)
    def arrive(self, client: int, tokens: list[int], check_tokens: bool, sealed: int) -> None:
        self.traffic.arrive(self.client(client), tokens, check_tokens, sealed)

    @rule(client=which, tokens=prompts, sealed=which)
    def press(self, client: int, tokens: list[int], sealed: int) -> None:
        self.traffic.press(self.client(client), tokens, sealed)

    @rule(one=which, other=which, tokens=prompts)
    def race(self, one: int, other: int, tokens: list[int]) -> None:
        self.traffic.race(self.client(one), self.client(other), tokens, False)

    @precondition(in_work)
    @rule(number=which, client=which, shared=which, tail=tails, sealed=which)
    def branch(self, number: int, client: int, shared: int, tail: list[int], sealed: int) -> None:
        """One process goes on from what another one has computed."""
        self.traffic.branch(self.request(number), self.client(client), shared, tail, sealed)

    @precondition(in_work)
    @rule(number=which, more=tails)
    def grow(self, number: int, more: list[int]) -> None:
        self.traffic.grow(self.request(number), more)

    @precondition(in_work)
    @rule(number=which, sealed=which)
    def seal_more(self, number: int, sealed: int) -> None:
        request = self.request(number)
        self.traffic.seal(request, request.sealed + sealed)

    @precondition(in_work)
    @rule(number=which, token=letters, finish=st.booleans(), sealed=st.booleans())
    def rewrite_the_tail(self, number: int, token: int, finish: bool, sealed: bool) -> None:
        self.traffic.rewrite_the_tail(self.request(number), token, finish, sealed)

    @precondition(in_work)
    @rule(number=which, how=st.sampled_from(["release", "twice", "force", "close"]))
    def leave(self, number: int, how: str) -> None:
        self.traffic.leave(self.request(number), how)

    @rule(client=which, count=st.integers(1, 5), what=st.sampled_from(["evict", "reclaim", "tidy", "audit"]))
    def tend(self, client: int, count: int, what: str) -> None:
        traffic, by = self.traffic, self.client(client)
        if what == "evict":
            traffic.evict(by, count)
        else:
            {"reclaim": traffic.reclaim, "tidy": traffic.tidy, "audit": traffic.audit}[what](by)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.check()

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            with self.directory:
                self.end_all()

    def end_all(self) -> None:
        """Everybody is killed; the next one finds all that was indexed, and nothing lost."""
        blocks = self.traffic.clients[0].pools[0].stats().blocks
        for client in list(self.traffic.clients):
            self.traffic.kill(client)
        last = self.traffic.attach()
        self.traffic.check()
        assert last.pools[0].stats().blocks["cached"] == blocks["held"] + blocks["cached"]
        assert last.pools[0].available() == self.capacity
        self.traffic.audit(last)
        self.traffic.reset(last)
        assert last.pools[0].unused() == self.capacity
        self.traffic.detach(last)
        for side in self.traffic.sides:
            side.close()


def test_any_order_of_calls_of_several_processes() -> None:
    logging.getLogger("kvpool").disabled = True
    logging.getLogger("kvpool.pool").disabled = True
    try:
        run_state_machine_as_test(
            SharedMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
        )
    finally:
        logging.getLogger("kvpool").disabled = False
        logging.getLogger("kvpool.pool").disabled = False
