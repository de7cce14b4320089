"""Any order of calls of one process, on a small pool and its twin, with prompts over two tokens so that prefixes
collide all the time. `twin/traffic.py` has what is done and what must hold.

In two thirds of the runs the keys are bad, each in its own way, so that keys collide too.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Final, Literal

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
from tests.kvpool.twin.traffic import Request, Traffic

KEYS: Final[tuple[Literal["true", "alike", "rootless"], ...]] = ("true", "alike", "rootless")
letters = st.integers(0, 2)
prompts = st.lists(letters, min_size=1, max_size=8)
tails = st.lists(letters, min_size=1, max_size=4)
which = st.integers(0, 12)


def in_work(machine: PoolMachine) -> bool:
    return bool(machine.traffic.open_requests())


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow, branch and go, while an administrator evicts and processes follow one another.

    Rules name a request by number; the number is taken modulo those that are open.
    """

    @initialize(capacity=st.integers(4, 16), size=st.integers(1, 3), keys=st.sampled_from(KEYS))
    def start(self, capacity: int, size: int, keys: Literal["true", "alike", "rootless"]) -> None:
        clock = Clock()
        self.capacity = capacity
        self.directory = tempfile.TemporaryDirectory()
        real = RealSide(Path(self.directory.name), capacity, size, clock)
        self.traffic = Traffic([real, TwinSide(capacity, size, clock, exact_order=True)], clock, size, keys)
        self.client = self.traffic.attach()

    def request(self, number: int) -> Request:
        open_requests = self.traffic.open_requests()
        return open_requests[number % len(open_requests)]

    @rule(tokens=prompts, check_tokens=st.booleans(), sealed=which)
    def arrive(self, tokens: list[int], check_tokens: bool, sealed: int) -> None:
        self.traffic.arrive(self.client, tokens, check_tokens, sealed)

    @rule(tokens=prompts, sealed=which)
    def press(self, tokens: list[int], sealed: int) -> None:
        self.traffic.press(self.client, tokens, sealed)

    @rule(tokens=prompts, swap=st.booleans())
    def race(self, tokens: list[int], swap: bool) -> None:
        self.traffic.race(self.client, self.client, tokens, swap)

    @precondition(in_work)
    @rule(number=which, shared=which, tail=tails, sealed=which)
    def branch(self, number: int, shared: int, tail: list[int], sealed: int) -> None:
        self.traffic.branch(self.request(number), self.client, shared, tail, sealed)

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
    @rule(number=which)
    def finish_copy(self, number: int) -> None:
        self.traffic.finish_copy(self.request(number))

    @precondition(in_work)
    @rule(number=which, how=st.sampled_from(["release", "twice", "force", "close"]))
    def leave(self, number: int, how: str) -> None:
        self.traffic.leave(self.request(number), how)

    @rule(count=st.integers(1, 5), what=st.sampled_from(["evict", "reset", "audit", "tidy"]))
    def tend(self, count: int, what: str) -> None:
        if what == "evict":
            self.traffic.evict(self.client, count)
        else:
            {"reset": self.traffic.reset, "audit": self.traffic.audit, "tidy": self.traffic.tidy}[what](self.client)

    @precondition(in_work)
    @rule(how=st.sampled_from(["end", "die"]))
    def next_life(self, how: str) -> None:
        """The process ends or is killed, and another one takes the region over: what is indexed stays."""
        blocks = self.client.pools[0].stats().blocks
        indexed = blocks["held"] + blocks["cached"]
        if how == "end":
            self.traffic.detach(self.client)
        else:
            self.traffic.kill(self.client)
        self.client = self.traffic.attach()
        assert self.client.pools[0].stats().blocks["cached"] == indexed
        assert self.client.pools[0].available() == self.capacity

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "client"):
            self.traffic.check()

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            with self.directory:
                self.end_all()

    def end_all(self) -> None:
        for request in list(self.client.requests):
            self.traffic.leave(request, "release")
        self.traffic.check()
        assert self.client.pools[0].held_blocks() == 0
        assert self.client.pools[0].available() == self.capacity
        self.traffic.detach(self.client)
        for side in self.traffic.sides:
            side.close()


def test_any_order_of_calls() -> None:
    logging.getLogger("kvpool").disabled = True
    logging.getLogger("kvpool.pool").disabled = True
    try:
        run_state_machine_as_test(
            PoolMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
        )
    finally:
        logging.getLogger("kvpool").disabled = False
        logging.getLogger("kvpool.pool").disabled = False
