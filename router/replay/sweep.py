"""Many runs of one trace: every policy, load and seed, on as many processes as are allowed.

Every policy gets the same arrivals. Seeds decide ties, which router a request comes to, and whether what replicas take is
believed to be `rate_error` times too fast (even seeds) or too slow (odd ones) at the beginning.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

from router.replay.errors import ReplayError
from router.replay.report import Figures, figures, medians
from router.replay.service_times import ServiceTimes
from router.replay.simulation import DEFAULTS, Plan, Simulation
from router.replay.trace import Trace
from router.route_config import PolicyName, RouteConfig

MOST_LOAD: Final = 1000.0
MOST_RATE_ERROR: Final = 1000.0
MOST_LAG_S: Final = 3600.0
MOST_ARRIVALS_S: Final = 1e6
MOST_WORK_S: Final = 1e7
MOST_ANSWER_TOKENS: Final = 1e9
"""What one run may take in simulated time, and in steps: beyond it none would end while somebody waits."""

Control = Literal["none", "no-sharing"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run. `loads` are shares of saturation (`ServiceTimes.saturated_s`). `control` no-sharing: every block is unlike
    all others.

    Raises ReplayError for values that make no run.
    """

    policies: Sequence[PolicyName]
    replicas: int
    routers: int
    pool_tokens: int | None
    loads: Sequence[float]
    lag_s: float
    seeds: int
    rate_error: float = 2.0
    control: Control = "none"
    options: RouteConfig = DEFAULTS
    """See `Plan.options`."""

    def __post_init__(self) -> None:
        if not self.policies or not self.loads or self.seeds < 1 or self.replicas < 1 or self.routers < 1:
            raise ReplayError("a replay needs at least one policy, load, seed, replica and router")
        if not all(0 < load < MOST_LOAD for load in self.loads):
            raise ReplayError(f"the loads of a replay are above 0 and below {MOST_LOAD:g}, got {self.loads}")
        if not 1 / MOST_RATE_ERROR <= self.rate_error <= MOST_RATE_ERROR:
            raise ReplayError(
                f"the rate error of a replay is from {1 / MOST_RATE_ERROR:g} to {MOST_RATE_ERROR:g}, got {self.rate_error:g}"
            )
        if not 0 <= self.lag_s <= MOST_LAG_S:
            raise ReplayError(f"the lag of a replay is from 0 to {MOST_LAG_S:g} s, got {self.lag_s:g} s")


@dataclass(frozen=True, slots=True)
class _Task:
    plan: Plan
    load: float


def run(
    sweep: Sweep, trace: Trace, times: ServiceTimes, jobs: int = 1, progress: Callable[[Figures], None] | None = None
) -> list[Figures]:
    """Returns the figures of each load and policy, in this order. `progress` is told of each that is complete.

    Raises ReplayError.
    """
    if sweep.control == "no-sharing":
        trace = trace.unshared()
    _check(sweep, trace, times)
    tasks = list(_tasks(sweep))
    if jobs <= 1:
        return _gathered(sweep, (_figures(sweep, trace, times, task) for task in tasks), progress)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), spawned, _begin, (sweep, trace, times)) as workers:
        return _gathered(sweep, workers.map(_work, tasks), progress)


def _check(sweep: Sweep, trace: Trace, times: ServiceTimes) -> None:
    """Raises ReplayError for what no replay would come to the end of, and for pools that hold nothing."""
    if sweep.pool_tokens is not None and sweep.pool_tokens < trace.block_tokens:
        raise ReplayError(
            f"a pool of {sweep.pool_tokens:,} tokens is less than one block of the trace ({trace.block_tokens:,} tokens): give "
            f"more --pool-tokens"
        )
    answers = int(trace.output_tokens.sum())
    if answers > MOST_ANSWER_TOKENS:
        raise ReplayError(
            f"the answers of the trace have {answers:,} tokens together, and a replay takes {MOST_ANSWER_TOKENS:,.0f} at most: "
            f"give fewer --requests"
        )
    work_s = times.longest_s(trace)
    if work_s > MOST_WORK_S:
        raise ReplayError(
            f"a replica would work {work_s:,.0f} s at the trace, and a replay takes {MOST_WORK_S:,.0f} at most: give fewer "
            f"--requests, or a --calibration with shorter times"
        )
    load = min(sweep.loads)
    length_s = times.saturated_s(trace, sweep.replicas) / load
    if length_s > MOST_ARRIVALS_S:
        raise ReplayError(
            f"at load {load:g} the trace takes {length_s:,.0f} s, and a replay {MOST_ARRIVALS_S:,.0f} at most: give a higher "
            f"--load, or fewer --requests"
        )


def _tasks(sweep: Sweep) -> Iterator[_Task]:
    for load in sweep.loads:
        for policy in sweep.policies:
            for seed in range(sweep.seeds):
                error = sweep.rate_error if seed % 2 == 0 else 1.0 / sweep.rate_error
                plan = Plan(
                    policy, sweep.replicas, sweep.routers, sweep.pool_tokens, sweep.lag_s, seed, error, sweep.options
                )
                yield _Task(plan, load)


def _gathered(sweep: Sweep, found: Iterator[Figures], progress: Callable[[Figures], None] | None) -> list[Figures]:
    runs: list[Figures] = []
    of_seeds: list[Figures] = []
    for one in found:
        of_seeds.append(one)
        if len(of_seeds) == sweep.seeds:
            runs.append(medians(of_seeds))
            of_seeds = []
            if progress is not None:
                progress(runs[-1])
    return runs


def _figures(sweep: Sweep, trace: Trace, times: ServiceTimes, task: _Task) -> Figures:
    stretched = trace.stretched(times.saturated_s(trace, sweep.replicas) / task.load)
    outcome = Simulation(stretched, times, task.plan).run()
    return figures(task.plan, task.load, sweep.control, stretched, outcome)


# In a worker process: what all its tasks have in common.
_common: list[tuple[Sweep, Trace, ServiceTimes]] = []


def _begin(sweep: Sweep, trace: Trace, times: ServiceTimes) -> None:
    _common[:] = [(sweep, trace, times)]


def _work(task: _Task) -> Figures:
    return _figures(*_common[0], task)
