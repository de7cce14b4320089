"""One run of the engine benchmark: processes, rounds, and the figures made of them.

Each engine lives in a process of its own, so that threads, cores and memory are its own: one with all threads wherever the kernel
puts them, and two with half of them each, on a core of their own where that is one thread. One more process measures the
machine. Before the rounds, all prompts of the grid are computed once; in the rounds they are found cached (`engine_scene.py`).

Rounds. Every round measures each point of the grid once, and shortly: a shared machine changes its speed from second to
second, by as much as 1.75 times. The bandwidth is measured before and after each point, and a point's ceiling is made of the
mean of the two; likewise the matrix products around each prompt. A figure is the median over the rounds, a fraction the
median of the rounds' fractions; of rounds in which others took processor time only where there are no others
(`engine_others.py`).

    grid               decode tokens a second of `batch` sequences in all, their contexts `ctx` tokens long on average
    prefill_tok_s      a prompt that is not cached, from asking to its first token
    prefill_fraction   floating-point operations of its linear layers by that whole time, over `gemm_gflops`
    cached_ttft_ms     the same prompt again
    cold_ttft_ms       the prompt that is not cached
    startup            where a start spends its time, from the process to the first token; of the first engine started
    peak_rss_mb        most memory resident in the one engine's process, the touched part of its pool included

Limits: Linux; must be used from the main thread, which receives the signals. On a machine with one core the two engines
share it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from actors.config import PoolConfig
from actors.loader import resolve_model
from actors.progress import TerminalProgress
from cluster.bench import engine_fit
from cluster.bench.engine_fit import Fit, Step
from cluster.bench.engine_others import QUIET, now, undisturbed
from cluster.bench.engine_plan import SKIPPED, Plan, Point, prompt_tokens
from cluster.bench.engine_rates import Marks, Shape, ceiling_tok_s, linear_share, steady, until_together
from cluster.bench.pool_process import Worker, cores
from cluster.bench.pool_run import regions
from cluster.bench.router_run import cache_bytes
from cluster.bench.server import signals_as_interrupts

MODULE: Final = "cluster.bench.engine_worker"
READ_BYTES: Final = 512 * 1024 * 1024
"""At least; and twice the last-level cache where that is more, so that what is read is never there any more."""
READ_S: Final = 0.1
GEMM_S: Final = 0.15
OPEN_S: Final = 600.0
"""A large model takes its time to load, and a long prompt to be computed."""
CACHED_ASKS: Final = 3
_PROMPTS: Final = 1000
_TAILS: Final = 100_000
"""Numbers of prompts beyond those of the grid: one a round, and one for each measured tail."""

_LEAST_TAILS: Final = 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Taken:
    """One measurement of one point."""

    point: Point
    tok_s: float
    ceiling_tok_s: float
    bandwidth_gb_s: float
    context_tokens: float
    others: float = 0.0

    @property
    def fraction(self) -> float:
        """Of the ceiling at that moment."""
        return self.tok_s / self.ceiling_tok_s


@dataclass(frozen=True, slots=True)
class Prompted:
    """One prompt, asked for cold and then cached."""

    prompt_tokens: int
    cold_s: float
    cached_s: Sequence[float]
    gemm_gflops: float
    linear_share: float
    others: float = 0.0


class Machine:
    """The process that measures what the machine can do."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def bandwidth(self) -> float:
        """GB/s now."""
        return float(self._worker.ask("bandwidth", seconds=READ_S)["gb_s"])

    def gemm(self) -> float:
        """GFLOP/s now."""
        return float(self._worker.ask("gemm", seconds=GEMM_S)["gflops"])


def measure(plan: Plan, directory: Path, say: Say) -> tuple[dict[str, Any], Fit | None]:
    """Runs it all, with regions in `directory`; the report, and the fitted service times if the plan asks for them.

    `say` hears of progress. Raises KvatlasError: what the model, the pool or a process refuses.
    """
    busy = os.getloadavg()[0]
    files = resolve_model(plan.model, TerminalProgress())
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_as_interrupts())
        name = stack.enter_context(regions(directory))
        machine_worker = stack.enter_context(Worker(None, MODULE))
        read_bytes = max(READ_BYTES, 2 * cache_bytes())
        common: dict[str, Any] = {"model_dir": str(files.path), "mode": plan.mode}
        answered(machine_worker, "look", **common, threads=plan.threads, read_bytes=read_bytes)
        machine = Machine(machine_worker)
        with contextlib.ExitStack() as engines:
            say("starting one engine")
            common |= {"directory": str(directory), "deterministic": plan.deterministic}
            one, opened = _opened(engines, plan, common, f"{name}-0", None, 1)
            shape = Shape(opened["weight_bytes"], opened["linear_parameters"], opened["token_bytes"])
            bench = _Bench(plan, shape, machine, {1: [one]})
            if any(point.engines == 2 for point in plan.points):
                say("starting two engines")
                bench.engines[2] = [
                    _opened(engines, plan, common, f"{name}-{number + 1}", core, 2)[0]
                    for number, core in enumerate(_cores(plan))
                ]
            bench.fill(say)
            taken: list[Taken] = []
            prompted: list[Prompted] = []
            for number in range(plan.rounds):
                say(f"round {number + 1} of {plan.rounds}")
                taken += bench.grid()
                prompted.append(bench.prompted(number))
            found = bench.fit(taken, opened, say) if plan.calibrate else None
            peak_mb = one.ask("peak")["mb"]
        report = {
            **figures(taken, prompted),
            "bandwidth_gb_s": bandwidth_gb_s(taken) if taken else machine.bandwidth(),
            "peak_rss_mb": peak_mb,
            "startup": opened["startup"],
            "weight_bytes": shape.weight_bytes,
            "token_bytes": shape.token_bytes,
        }
        if plan.http:
            from cluster.bench.engine_http import measure_http

            report["http"] = measure_http(plan, shape, machine, report, say)
    return {**report, "load_before": busy, "by_round": [row(one) for one in taken]}, found


def figures(taken: Sequence[Taken], prompted: Sequence[Prompted]) -> dict[str, Any]:
    """The report's figures: medians over the rounds. `disturbed_share`: of all measurements, those that others disturbed."""
    found: list[Taken | Prompted] = [*taken, *prompted]
    prompted = undisturbed(prompted)
    return {
        "grid": grid_figures(taken),
        "disturbed_share": sum(one.others > QUIET for one in found) / len(found),
        "gemm_gflops": _median(one.gemm_gflops for one in prompted),
        "prefill_tok_s": _median(one.prompt_tokens / one.cold_s for one in prompted),
        "prefill_fraction": _median(one.linear_share for one in prompted),
        "cached_ttft_ms": 1e3 * _median(seconds for one in prompted for seconds in one.cached_s),
        "cold_ttft_ms": 1e3 * _median(one.cold_s for one in prompted),
    }


def bandwidth_gb_s(taken: Sequence[Taken]) -> float:
    """The median over the measurements of the grid."""
    return _median(one.bandwidth_gb_s for one in undisturbed(taken))


def grid_figures(taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """One entry for each point, in the order in which the points first came."""
    return [
        {
            **asdict(point),
            "tok_s": _median(one.tok_s for one in kept),
            "ceiling_tok_s": _median(one.ceiling_tok_s for one in kept),
            "fraction": _median(one.fraction for one in kept),
        }
        for point, kept in _by_point(taken).items()
    ]


def take(
    point: Point,
    streams: Sequence[Marks],
    prompt: int,
    shape: Shape,
    bandwidths_gb_s: tuple[float, float],
    others: float,
) -> Taken:
    """What these streams behind prompts of `prompt` tokens mean, between two measurements of the bandwidth; `others` took so
    much of the processors meanwhile.
    """
    found = steady(streams)
    context, bandwidth = prompt + found.generated, sum(bandwidths_gb_s) / 2
    ceiling = ceiling_tok_s(shape, point.batch, point.engines, context, bandwidth)
    return Taken(point, found.tokens_per_s, ceiling, bandwidth, context, others)


def answered(worker: Worker, do: str, **arguments: Any) -> dict[str, Any]:
    """As `Worker.ask`, for what may take long."""
    worker.send(do, **arguments)
    return worker.answer(OPEN_S)


def calibration_steps(taken: Sequence[Taken]) -> list[Step]:
    """The decode steps of one engine, one for each point of the grid."""
    return [
        Step(_median(point.batch / one.tok_s for one in kept), 0, 0, point.batch, point.batch * kept[0].context_tokens)
        for point, kept in _by_point(taken).items()
        if point.engines == 1
    ]


def _by_point(taken: Sequence[Taken]) -> dict[Point, list[Taken]]:
    """The measurements of each point that count, in the order in which the points first came."""
    points: dict[Point, list[Taken]] = defaultdict(list)
    for one in taken:
        points[one.point].append(one)
    return {point: undisturbed(found) for point, found in points.items()}


class _Bench:
    """The engines, by how many share a load."""

    def __init__(self, plan: Plan, shape: Shape, machine: Machine, engines: Mapping[int, list[Worker]]) -> None:
        self._plan = plan
        self._shape = shape
        self._machine = machine
        self.engines = dict(engines)

    def fill(self, say: Say) -> None:
        """Has every engine compute its prompts of the grid once."""
        plan = self._plan
        for count, workers in self.engines.items():
            points = [point for point in plan.points if point.engines == count]
            if not points:
                continue
            say(f"computing the prompts of {count} engine{'s' * (count > 1)}")
            asks = _numbers(max(point.batch for point in points), count)
            for worker, numbers in zip(workers, asks, strict=True):
                worker.send("fill", numbers=numbers, tokens=plan.longest_tokens)
            for worker in workers:
                worker.answer(OPEN_S)

    def grid(self) -> Iterator[Taken]:
        """Every point once."""
        for point in self._plan.points:
            yield until_together(functools.partial(self._point, point), self._plan.steps)

    def _point(self, point: Point, steps: int) -> Taken:
        """One point, in so many steps."""
        begun, before = now(), self._machine.bandwidth()
        tokens, workers = prompt_tokens(point.ctx, steps), self.engines[point.engines]
        for worker, numbers in zip(workers, _numbers(point.batch, point.engines), strict=True):
            worker.send("decode", numbers=numbers, tokens=tokens, generated=steps + SKIPPED + 1)
        streams = [stream for worker in workers for stream in worker.answer(OPEN_S)["streams"]]
        bandwidths = (before, self._machine.bandwidth())
        return take(point, streams, tokens, self._shape, bandwidths, now().others_since(begun))

    def prompted(self, number: int) -> Prompted:
        """A prompt that nobody has seen, and the same again."""
        plan, one = self._plan, self.engines[1][0]
        begun, before = now(), self._machine.gemm()
        cold_s, *cached_s = [
            answered(one, "first_token", number=_PROMPTS + number, tokens=plan.prompt_tokens)["seconds"]
            for _ in range(1 + CACHED_ASKS)
        ]
        gemm = (before + self._machine.gemm()) / 2
        share = linear_share(self._shape, plan.prompt_tokens, cold_s, gemm)
        return Prompted(plan.prompt_tokens, cold_s, cached_s, gemm, share, now().others_since(begun))

    def fit(self, taken: Sequence[Taken], opened: Mapping[str, Any], say: Say) -> Fit:
        """Service times of the one engine: from the grid, and from prompts' ends of several sizes behind cached beginnings."""
        say("measuring steps of prompts")
        one, size, block_tokens = self.engines[1][0], int(opened["step_tokens"]), PoolConfig().block_tokens
        most = (self._plan.longest_tokens - 1) // block_tokens * block_tokens
        starts = sorted({0, most // 2 // block_tokens * block_tokens, most})
        sizes = sorted({max(2, size // 4), max(2, size // 2), size})
        tails: dict[tuple[int, int], list[float]] = defaultdict(list)
        own = _TAILS
        for _ in range(max(_LEAST_TAILS, self._plan.rounds)):
            for start, tokens in itertools.product(starts, sizes):
                own += 1
                found = answered(one, "tail", number=0, start=start, own=own, tokens=tokens)
                # A pool that is short may have dropped what was cached; the step is then another one.
                if found["cached_tokens"] == start:
                    tails[start, tokens].append(found["seconds"])
        steps = calibration_steps(taken)
        steps += [Step(_median(seconds), tokens, start) for (start, tokens), seconds in tails.items()]
        return engine_fit.fit(steps, size, int(opened["max_running"]))


def _opened(
    stack: contextlib.ExitStack, plan: Plan, common: Mapping[str, Any], name: str, core: int | None, engines: int
) -> tuple[Worker, dict[str, Any]]:
    """A child with an engine that is one of `engines`, and what it says of its start."""
    worker = stack.enter_context(Worker(core, MODULE))
    threads = max(1, plan.threads // engines)
    batch = -(-max(plan.batches, default=1) // engines)
    told = answered(
        worker, "open", **common, name=name, threads=threads, pool_tokens=plan.pool_tokens(engines), max_running=batch
    )
    return worker, told


def _cores(plan: Plan) -> list[int | None]:
    """A core for each of two engines; none where an engine has more than one thread."""
    return cores(2, os.sched_getaffinity(0)) if plan.threads <= 2 else [None, None]


def _numbers(batch: int, engines: int) -> list[list[int]]:
    """Which prompts each of `engines` continues."""
    share = batch // engines
    return [list(range(engine * share, (engine + 1) * share)) for engine in range(engines)]


def row(one: Taken) -> dict[str, float]:
    """One measurement, for the report."""
    return {
        **asdict(one.point),
        "tok_s": round(one.tok_s, 2),
        "fraction": round(one.fraction, 4),
        "bandwidth_gb_s": round(one.bandwidth_gb_s, 2),
        "others": round(one.others, 3),
    }


def _median(values: Any) -> float:
    return float(statistics.median(values))
