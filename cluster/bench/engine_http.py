"""The grid of the engine benchmark through HTTP: a server with one replica, then one with two that share its threads.

Each server is private and stopped again (`server.py`). The streams are those of the in-process grid, only longer: through HTTP
they do not begin together, and what is measured is the time when all of them run. Prompts are computed before; with two
replicas the router spreads them then, and follows them later.

`over_engine` is the fraction here over the one in process. `split` says how many streams each replica had, in the last round.

Limits: the client, the proxy and the ingress share the machine with the replicas, as they do where everything runs on one.
"""

from __future__ import annotations

import functools
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster import http_client
from cluster.bench.engine_client import Stream, ask
from cluster.bench.engine_others import now, undisturbed
from cluster.bench.engine_plan import SKIPPED, Plan, Point, prompt_tokens
from cluster.bench.engine_rates import Shape, until_together
from cluster.bench.engine_run import CACHED_ASKS, Machine, Taken, grid_figures, row, take
from cluster.bench.server import Server, serve_command, serving

LONGER: Final = 2
_IDS: Final = 200
"""Prompts are made of ids below this, which every vocabulary has."""
_READY_S: Final = 900.0
_COLD: Final = 1000

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class First:
    """Seconds to the first token of one prompt, cold and then cached."""

    cold_s: float
    cached_s: Sequence[float]
    others: float = 0.0


def measure_http(plan: Plan, shape: Shape, machine: Machine, inside: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """The report's part. `inside` is what was measured in process. Raises ServeFailed, BenchFailed."""
    taken: list[Taken] = []
    splits: dict[Point, list[int]] = {}
    startup: list[dict[str, Any]] = []
    firsts: list[First] = []
    for replicas in sorted({1, *(point.engines for point in plan.points)}):
        points = [point for point in plan.points if point.engines == replicas]
        say(f"starting a server with {replicas} replica{'s' * (replicas > 1)}")
        begun = time.monotonic()
        with serving(_command(plan, replicas), replicas, os.environ, _READY_S) as server:
            startup.append({"replicas": replicas, "ready_s": time.monotonic() - begun, "load_s": _load_s(server)})
            through = _Through(plan, shape, machine, server)
            if points:
                say("computing the prompts")
                through.ask(range(max(point.batch for point in points)), plan.longest_tokens, 1)
            for number in range(plan.rounds):
                say(f"round {number + 1} of {plan.rounds}")
                taken += [
                    until_together(functools.partial(through.point, point), LONGER * plan.steps) for point in points
                ]
                if replicas == 1:
                    firsts.append(through.first(number))
            splits |= through.splits
    by_round = [row(one) for one in taken]
    return http_figures(taken, splits, firsts, inside) | {"startup": startup, "by_round": by_round}


def http_figures(
    taken: Sequence[Taken],
    splits: Mapping[Point, Sequence[int]],
    firsts: Sequence[First],
    inside: Mapping[str, Any],
) -> dict[str, Any]:
    """The figures: medians over the rounds, beside the fractions of the `inside` grid."""
    within = {(one["ctx"], one["batch"], one["engines"]): one["fraction"] for one in inside["grid"]}
    grid = [
        {
            **one,
            "over_engine": one["fraction"] / within[one["ctx"], one["batch"], one["engines"]],
            "split": list(splits[Point(one["ctx"], one["batch"], one["engines"])]),
        }
        for one in grid_figures(taken)
    ]
    firsts = undisturbed(firsts)
    cached_s = [seconds for one in firsts for seconds in one.cached_s]
    return {
        "grid": grid,
        "cold_ttft_ms": 1e3 * statistics.median(one.cold_s for one in firsts),
        "cached_ttft_ms": 1e3 * statistics.median(cached_s),
    }


class _Through:
    """A server that is measured."""

    def __init__(self, plan: Plan, shape: Shape, machine: Machine, server: Server) -> None:
        self._plan, self._shape, self._machine, self._url = plan, shape, machine, server.url
        self._model = str(http_client.get(f"{server.url}/v1/models", 30.0).body["data"][0]["id"])
        self.splits: dict[Point, list[int]] = {}

    def ask(self, numbers: Sequence[int], tokens: int, generated: int) -> list[Stream]:
        """Streams of the first `tokens` tokens of these prompts, all together."""
        return ask(self._url, self._model, [prompt(number, tokens) for number in numbers], generated)

    def point(self, point: Point, steps: int) -> Taken:
        """One point, in so many steps."""
        begun, before = now(), self._machine.bandwidth()
        tokens = prompt_tokens(point.ctx, steps)
        streams = self.ask(range(point.batch), tokens, steps + SKIPPED + 1)
        bandwidths = (before, self._machine.bandwidth())
        self.splits[point] = sorted(Counter(stream.replica for stream in streams).values())
        marks = [stream.marks for stream in streams]
        return take(point, marks, tokens, self._shape, bandwidths, now().others_since(begun))

    def first(self, number: int) -> First:
        """A prompt that the server has not seen, and the same again."""
        begun = now()
        cold_s, *cached_s = [
            self.ask([_COLD + number], self._plan.prompt_tokens, 2)[0].first_s for _ in range(1 + CACHED_ASKS)
        ]
        return First(cold_s, cached_s, now().others_since(begun))


def prompt(number: int, tokens: int) -> list[int]:
    """The first `tokens` ids of prompt `number`: the beginning of its longer ones, and like no other number's."""
    return random.Random(number).choices(range(_IDS), k=tokens)


def _command(plan: Plan, replicas: int) -> Callable[[int], Sequence[str]]:
    settings = [f"engine.threads={max(1, plan.threads // replicas)}", f"engine.mode={plan.mode}"]
    settings += [f"engine.deterministic={'true' if plan.deterministic else 'false'}"]
    return serve_command(plan.model, "cost", replicas, plan.pool_tokens(1), settings)


def _load_s(server: Server) -> dict[str, float]:
    """Seconds of each phase of the slowest replica."""
    slowest: dict[str, float] = {}
    for status in http_client.get(f"{server.url}/debug/state", 10.0, server.admin_key).body.get("replicas") or []:
        for phase, seconds in status["load_s"].items():
            slowest[phase] = max(slowest.get(phase, 0.0), float(seconds))
    return slowest
