"""The HTTP benchmark: what serving costs beside a bare echo on the same Ray Serve, in processor time and in waiting.

Rounds of kvatlas and of the echo take turns, in changing order, so that a machine that slows down slows both. A round's
processor time is that of the ingress, of the replicas behind it, of the proxy they share and, for kvatlas, of Redis, less what
the same processes use when nobody asks. The figures are medians over the rounds.

`ttft_added_ms_p50` is how much later the first token comes: the median over pairs of requests on an otherwise idle server, one to
each side right after the other. `ttft_added_loaded_ms_p50` is the difference of the medians while all clients ask, which on a
machine with few cores is mostly the wait for one of them.

Limits: the clients share the machine with the server, so on few cores both sides wait for them; the processor time of neither
contains them. Blocks are sealed once per prompt: what the pool and its publication cost for each new block is
measured by `kvatlas bench pool` and `kvatlas bench router`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from cluster.bench import http_echo, http_model
from cluster.bench.http_cpu import PROXY, REDIS, look
from cluster.bench.http_load import Answer, Connection, Side, load
from cluster.bench.http_plan import Plan
from cluster.bench.http_server import HOST, serving_both

OURS: Final = "kvatlas"
ECHO: Final = "echo"
PARTS: Final = {
    OURS: {"kvatlas:ingress": "ingress", "kvatlas:engine": "replicas", PROXY: "proxy", REDIS: "redis"},
    ECHO: {
        f"{http_echo.APP}:{http_echo.INGRESS}": "ingress",
        f"{http_echo.APP}:{http_echo.SOURCE}": "replicas",
        PROXY: "proxy",
    },
}
"""The processes that serve each side, by role, and what the report calls them."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of one side took: processor milliseconds a request by part, and the answers."""

    cpu_ms: Mapping[str, float]
    answers: Sequence[Answer]

    @property
    def total_ms(self) -> float:
        """Of all parts."""
        return sum(self.cpu_ms.values())


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """Runs it all and returns the report. `say` hears of progress. Raises BenchFailed, ServeFailed."""
    busy = os.getloadavg()[0]
    say("starting kvatlas and the echo")
    with serving_both(plan) as both:
        bench = _Bench(plan, both.port)
        say("warming up")
        bench.warm_up()
        bench.rest(plan.idle_s)
        rounds: dict[str, list[Round]] = {OURS: [], ECHO: []}
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            for side in (OURS, ECHO) if number % 2 else (ECHO, OURS):
                rounds[side].append(bench.round(side))
        say(f"{plan.pairs} pairs of requests on an idle server")
        added_s = bench.pairs()
    return {**figures(rounds, added_s), "rounds": plan.rounds, "load_before": busy}


def figures(rounds: Mapping[str, Sequence[Round]], added_s: Sequence[float]) -> dict[str, Any]:
    """The report's figures from the rounds of each side, and how much later each first token of a pair came, in seconds."""
    ours, echo = rounds[OURS], rounds[ECHO]
    return {
        "cpu_ms_per_request": _median(one.total_ms for one in ours),
        "echo_cpu_ms_per_request": _median(one.total_ms for one in echo),
        "cpu_ratio": _median(one.total_ms / other.total_ms for one, other in zip(ours, echo, strict=True)),
        "ttft_added_ms_p50": 1e3 * _median(added_s),
        "ttft_added_loaded_ms_p50": 1e3 * (_ttft_s(ours) - _ttft_s(echo)),
        "ttft_ms_p50": 1e3 * _ttft_s(ours),
        "echo_ttft_ms_p50": 1e3 * _ttft_s(echo),
        "whole_ms_p50": 1e3 * _median(one.whole_s for each in ours for one in each.answers),
        "echo_whole_ms_p50": 1e3 * _median(one.whole_s for each in echo for one in each.answers),
        "events_per_request": _mean(one.events for each in ours for one in each.answers),
        "echo_events_per_request": _mean(one.events for each in echo for one in each.answers),
        "cpu_ms_by_part": _by_part(ours),
        "echo_cpu_ms_by_part": _by_part(echo),
    }


def cpu_ms(
    side: str, used: Mapping[str, float], idle_per_s: Mapping[str, float], seconds: float, requests: int
) -> dict[str, float]:
    """Processor milliseconds a request of the parts of `side`, of what roles `used` in `seconds`, less what they use at rest."""
    return {
        part: 1e3 * max(0.0, used.get(role, 0.0) - idle_per_s.get(role, 0.0) * seconds) / requests
        for role, part in PARTS[side].items()
    }


class _Bench:
    """The two sides on `port`, and what their processes use at rest."""

    def __init__(self, plan: Plan, port: int) -> None:
        self._plan = plan
        self._port = port
        self._idle_per_s: dict[str, float] = {}
        self._sides = {OURS: Side(OURS, "/v1/chat/completions", self._body), ECHO: Side(ECHO, "/echo/", self._body)}

    def _body(self, client: int) -> dict[str, Any]:
        """What a client asks for; each has a prompt of its own. The echo reads no more than `max_tokens` of it."""
        words = f"client {client} asks: " + "how many words does a prompt have? " * self._plan.prompt_chars
        return {
            "model": http_model.NAME,
            "messages": [{"role": "user", "content": words[: self._plan.prompt_chars]}],
            "max_tokens": self._plan.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    def warm_up(self) -> None:
        """Both sides have answered every prompt before anything is measured."""
        for side in self._sides.values():
            asyncio.run(self._load(side, max(self._plan.warm_up, self._plan.concurrency)))

    def rest(self, seconds: float) -> None:
        """Notes what the processes use while nobody asks."""
        before = look(os.getpid())
        time.sleep(seconds)
        self._idle_per_s = {role: used / seconds for role, used in look(os.getpid()).since(before).items()}

    def round(self, name: str) -> Round:
        """One round of a side."""
        plan = self._plan
        before, begun = look(os.getpid()), time.monotonic()
        answers = asyncio.run(self._load(self._sides[name], plan.requests))
        used, seconds = look(os.getpid()).since(before), time.monotonic() - begun
        return Round(cpu_ms(name, used, self._idle_per_s, seconds, plan.requests), answers)

    def pairs(self) -> list[float]:
        """How much later kvatlas's first token came, in seconds, for each pair of requests."""
        return asyncio.run(self._pairs())

    async def _pairs(self) -> list[float]:
        short = {name: Side(side.name, side.path, self._short) for name, side in self._sides.items()}
        added = []
        with closing(Connection(HOST, self._port, time.perf_counter)) as connection:
            for number in range(self._plan.pairs):
                took = {}
                for name in (OURS, ECHO) if number % 2 else (ECHO, OURS):
                    took[name] = (await connection.ask(short[name], number % self._plan.concurrency)).first_s
                added.append(took[OURS] - took[ECHO])
        return added

    def _short(self, client: int) -> dict[str, Any]:
        return self._body(client) | {"max_tokens": 2}

    async def _load(self, side: Side, requests: int) -> list[Answer]:
        return await load(HOST, self._port, side, requests, self._plan.concurrency, time.perf_counter)


def _by_part(rounds: Sequence[Round]) -> dict[str, float]:
    return {part: _median(one.cpu_ms[part] for one in rounds) for part in rounds[0].cpu_ms}


def _ttft_s(rounds: Sequence[Round]) -> float:
    return _median(one.first_s for each in rounds for one in each.answers)


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _mean(values: Any) -> float:
    return float(statistics.fmean(values))
