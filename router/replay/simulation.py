"""One run: a trace, a fleet of simulated replicas, and the router of the product, in simulated time.

What is the product's: everything from keys to choice (`RouteService`, chooser, bookings, policy, calibration), the mirror and
its follower, the publishers with their batches, heartbeats and digests. What is simulated: the replicas (`kernel.py`), how
long they compute (`service_times.py`), and the way between publishers and routers, which takes `lag_s` for everything
(`delayed_directory.py`, `routers.py`).

Time stops at every arrival: the fleet is brought to that moment in machine code, what happened is told to the routers in its
order, the routers hear what has become visible, and only then a request is decided and given to its replica. It also stops
`lag_s` before every arrival, where the publishers look at their pools: so what a router sees of the pools is exactly `lag_s`
old. Heartbeats go out on a grid of 50 ms, of which only the points count that are the last ones seen at an arrival (and one a
second). Requests, answers and what replicas say to their router travel in no time. Each request comes to a router drawn by
chance.

What replicas are expected to take (`RouteConfig`) is wrong at the beginning by `rate_error`.

Limits: deciding takes no simulated time; no replica fails; claims for cold prefixes are not simulated.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvpool.words import INDEXED, STATE_MASK
from router.follower import Follower
from router.mirror import Mirror
from router.replay import kernel, state
from router.replay.delayed_directory import DelayedDirectory
from router.replay.publishing import BEAT_S, Publishing
from router.replay.routers import LEASE_S, Routers
from router.replay.service_times import ServiceTimes
from router.replay.simulated_time import SimulatedTime
from router.replay.state import FINISHED, FIRST_TOKEN
from router.replay.trace import FloatArray, IntArray, Trace
from router.route_config import PolicyName, RouteConfig
from router.ticket import Ticket

DEFAULTS: Final = RouteConfig()
DRAIN_S: Final = 1.0
QUIET_BEAT_S: Final = 1.0
QUIET_S: Final = 2.0
"""Before the first arrival, so that every pool is in the directory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `pool_tokens` None: pools keep everything. `lag_s`: until what a pool or another router says is seen.

    `rate_error`: by this factor replicas seem faster at the beginning than they are, and decodes cheaper.
    """

    policy: PolicyName
    replicas: int
    routers: int
    pool_tokens: int | None
    lag_s: float
    seed: int
    rate_error: float
    options: RouteConfig = DEFAULTS
    """How to route, but for the policy and what replicas are taken to need, which are of the run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, by request: NaN and -1 for what was refused. `computed_tokens`: prompt tokens computed, by replica.

    `decide_s`, `decide_cpu_s`: wall and processor time of each decision. `router_totals`: the sum of what the routers counted.
    """

    replica: IntArray
    cached_tokens: IntArray
    ttft_s: FloatArray
    latency_s: FloatArray
    computed_tokens: IntArray
    decide_s: FloatArray
    decide_cpu_s: FloatArray
    evicted_blocks: int
    router_totals: dict[str, int]
    fallbacks: int


class Simulation:
    """A run that has not ended yet. `run` may be called once."""

    def __init__(self, trace: Trace, times: ServiceTimes, plan: Plan) -> None:
        """Raises ReplayError for sizes that make no fleet."""
        self._trace = trace
        self._plan = plan
        self._times = kernel.times_of(times)
        blocks = state.UNBOUNDED
        if plan.pool_tokens is not None:
            blocks = min(blocks, plan.pool_tokens // trace.block_tokens)
        self.fleet = state.made(trace, plan.replicas, blocks, times.max_running)
        self._events = state.events_for(trace)
        self._clock = SimulatedTime()
        self._replica_ids = tuple(f"replica-{number:04d}" for number in range(plan.replicas))
        self._number_of = {replica_id: number for number, replica_id in enumerate(self._replica_ids)}
        directory = DelayedDirectory(plan.lag_s, self._clock)
        self.mirror = Mirror()
        """The routers' picture of the pools."""
        self._follower = Follower(directory, self.mirror, self._clock)
        self.pool_names = tuple(f"pool-{replica_id}" for replica_id in self._replica_ids)
        self._publishing = Publishing(
            self.fleet,
            trace,
            list(zip(self.pool_names, self._replica_ids, strict=True)),
            directory,
            self._clock,
            LEASE_S,
            random.Random(f"{plan.seed}/pools"),
        )
        self._routers = Routers(
            plan.routers,
            self.mirror,
            config_of(trace, times, plan),
            block_tokens=trace.block_tokens,
            lag_s=plan.lag_s,
            clock=self._clock,
            seed=plan.seed,
        )
        self._rng = random.Random(f"{plan.seed}/clients")
        self._last_beat = 0.0
        self._tickets: dict[int, Ticket] = {}
        count = len(trace)
        self._replica = np.full(count, -1, dtype=np.int64)
        self._cached = np.full(count, -1, dtype=np.int64)
        self._ttft_s, self._latency_s = np.full(count, np.nan), np.full(count, np.nan)
        self._decide_s, self._decide_cpu_s = np.zeros(count), np.zeros(count)
        self._fallbacks = 0

    def run(self) -> Outcome:
        """Plays the whole trace until every request is done, and returns what came of it."""
        arrivals = (self._trace.arrival_s + QUIET_S).tolist()
        for request, at in enumerate(arrivals):
            self._pass_time(at)
            self._arrive(request)
        while self._tickets:
            self.rest(DRAIN_S)
        totals: dict[str, int] = {}
        for service in self._routers.services:
            for name, value in service.report().items():
                if type(value) is int:
                    totals[name] = totals.get(name, 0) + value
        return Outcome(
            self._replica,
            self._cached,
            self._ttft_s,
            self._latency_s,
            self.fleet.replicas.computed.copy(),
            self._decide_s,
            self._decide_cpu_s,
            int(self.fleet.pools.evicted.sum()),
            totals,
            self._fallbacks,
        )

    def rest(self, seconds: float) -> None:
        """Lets time pass without arrivals, so that everything becomes visible."""
        self._pass_time(self._clock() + seconds)

    def keys_of(self, number: int) -> set[bytes]:
        """Returns the keys that replica `number` has indexed."""
        pools = self.fleet.pools
        slots = np.flatnonzero(pools.state[number] & np.uint64(STATE_MASK) == INDEXED)
        return {self._trace.keys[node].tobytes() for node in pools.node_of[number][slots].tolist()}

    def _pass_time(self, until: float) -> None:
        """Brings everything to `until`."""
        look = until - self._plan.lag_s
        beat = math.floor(look / BEAT_S) * BEAT_S
        while beat - self._last_beat > QUIET_BEAT_S:
            self._look(self._last_beat + QUIET_BEAT_S)
            self._last_beat += QUIET_BEAT_S
        if beat > self._last_beat:
            self._look(beat)
            self._last_beat = beat
        if look > self._clock():
            self._look(look)
        self._settle(until)
        self._follower.step(0.0)

    def _look(self, at: float) -> None:
        """Publishers look at their pools."""
        self._settle(at)
        self._publishing.step()
        self._follower.step(0.0)

    def _settle(self, until: float) -> None:
        """Lets the fleet work until then, and tells its routers."""
        events = self._events
        count = kernel.advance(self.fleet, until, self._times, kernel.FORM, kernel.KINDS, events)
        self._tell(count)
        self._clock.move_to(until)
        self._routers.hear()

    def _tell(self, count: int) -> None:
        """Takes account of the first `count` events, in the order of time, and tells them to the routers."""
        if not count:
            return
        events = self._events
        order = np.argsort(events.time[:count], kind="stable")
        columns = [column[order].tolist() for column in (events.time, events.kind, events.request, events.value)]
        for at, kind, request, value in zip(*columns, strict=True):
            self._clock.move_to(at)
            self._routers.hear()
            ticket = self._tickets[request]
            arrived_at = float(self._trace.arrival_s[request]) + QUIET_S
            if kind == FINISHED:
                self._latency_s[request] = at - arrived_at
                del self._tickets[request]
                ticket.close()
            elif kind == FIRST_TOKEN:
                self._ttft_s[request] = at - arrived_at
                ticket.started()
            else:
                self._cached[request] = value
                ticket.admitted(self._replica_ids[self._replica[request]], value)

    def _arrive(self, request: int) -> None:
        """A request comes: it is decided and given to its replica."""
        trace = self._trace
        service = self._routers.services[self._rng.randrange(self._plan.routers)]
        name = f"request-{request}"
        given, answer = int(trace.input_tokens[request]), int(trace.output_tokens[request])
        ticket = service.ticket(name, trace.packed_keys(request), given, answer)
        began, began_cpu = time.perf_counter(), time.thread_time()
        decision = service.route(name, self._replica_ids)
        self._decide_s[request] = time.perf_counter() - began
        self._decide_cpu_s[request] = time.thread_time() - began_cpu
        self._fallbacks += decision.outcome == "fallback"
        number = self._number_of[decision.replica_id]
        count = kernel.submit(
            self.fleet,
            number,
            request,
            decision.predicted_tokens,
            self._clock(),
            self._times,
            kernel.FORM,
            kernel.KINDS,
            self._events,
        )
        if count < 0:
            ticket.close()
            return
        self._replica[request] = number
        self._tickets[request] = ticket
        service.routed(name, decision.replica_id)
        self._tell(count)


def config_of(trace: Trace, times: ServiceTimes, plan: Plan) -> RouteConfig:
    """Returns how to route, with rates that are wrong by the plan's `rate_error`.

    Right would be the speed of the trace's mean prompt, and for a decode what one of mean length adds to each step of such a
    prompt.
    """
    prompt = float(np.mean(trace.input_tokens))
    rate = times.prefill_tokens_per_s(prompt)
    decode_s = times.decode_s(prompt) * max(1.0, prompt / times.step_tokens)
    return replace(
        plan.options,
        policy=plan.policy,
        prefill_tokens_per_s=rate * plan.rate_error,
        decode_interference_s=decode_s / plan.rate_error,
    )
