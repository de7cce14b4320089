"""Many runs: their order, what their seeds change, and that processes change nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from router.replay.errors import ReplayError
from router.replay.report import Figures
from router.replay.service_times import ServiceTimes
from router.replay.sweep import Sweep, run
from router.replay.trace import MOST_TOKENS, Trace
from router.route_config import RouteConfig
from tests.router.replay.traces import BLOCK, QUICK, mixed

SWEEP = Sweep(("cost", "round_robin"), replicas=2, routers=1, pool_tokens=None, loads=(0.5, 1.0), lag_s=0.05, seeds=2)
TRACE = mixed(31, requests=30)


def _timeless(runs: list[Figures]) -> list[Figures]:
    """Without what the machine's speed decides."""
    return [{name: value for name, value in one.items() if not name.startswith("decide_")} for one in runs]


def test_loads_then_policies_each_of_all_seeds() -> None:
    told: list[Figures] = []
    runs = run(SWEEP, TRACE, QUICK, progress=told.append)
    assert [(one["load"], one["policy"], one["seeds"]) for one in runs] == [
        (0.5, "cost", 2),
        (0.5, "round_robin", 2),
        (1.0, "cost", 2),
        (1.0, "round_robin", 2),
    ]
    assert told == runs
    assert runs[2]["arrivals_per_s"] == pytest.approx(2 * runs[0]["arrivals_per_s"])
    assert runs[0]["hit"] > runs[1]["hit"]


def test_options_of_the_router_hold_in_every_run_and_the_policy_is_the_runs_own() -> None:
    options = RouteConfig(policy="least_load", tie_s=1e9, prefill_tokens_per_s=1e-3)
    changed = run(replace(SWEEP, options=options, seeds=1, loads=(0.5,)), TRACE, QUICK)
    plain = run(replace(SWEEP, seeds=1, loads=(0.5,)), TRACE, QUICK)
    assert [one["policy"] for one in changed] == ["cost", "round_robin"]
    assert changed[0]["hit"] < plain[0]["hit"], "every replica is as good as the best"
    assert _timeless(changed[1:]) == _timeless(plain[1:]), "round robin has no use for them"


def test_the_control_shares_nothing() -> None:
    runs = run(replace(SWEEP, control="no-sharing", loads=(0.5,), seeds=1), TRACE, QUICK)
    assert [one["hit"] for one in runs] == [0.0, 0.0]
    assert {one["control"] for one in runs} == {"no-sharing"}


@pytest.mark.slow
def test_processes_change_nothing() -> None:
    assert _timeless(run(SWEEP, TRACE, QUICK, jobs=2)) == _timeless(run(SWEEP, TRACE, QUICK, jobs=1))


@pytest.mark.parametrize(
    "wrong",
    [{"policies": ()}, {"loads": ()}, {"loads": (0.0,)}, {"seeds": 0}, {"replicas": 0}, {"lag_s": -1.0}, {"rate_error": 0.0},
     {"loads": (0.5, 1e4)}, *({name: value} for name in ("lag_s", "rate_error") for value in (math.inf, math.nan, 1e9)),
     {"loads": (1.0, math.nan)}],
)  # fmt: skip
def test_what_makes_no_run_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ReplayError):
        replace(SWEEP, **wrong)


def test_a_pool_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ReplayError, match=r"less than one block of the trace \(8 tokens\).*--pool-tokens"):
        run(replace(SWEEP, pool_tokens=1), TRACE, QUICK)


def test_a_pool_of_any_size_is_one() -> None:
    huge = run(replace(SWEEP, pool_tokens=10**30, loads=(0.5,), seeds=1), TRACE, QUICK)
    everything = run(replace(SWEEP, loads=(0.5,), seeds=1), TRACE, QUICK)
    assert _timeless([one | {"pool_tokens": None} for one in huge]) == _timeless(everything)


LONG = replace(TRACE, output_tokens=np.full(len(TRACE), MOST_TOKENS))


@pytest.mark.parametrize(
    ("loads", "trace", "times", "words"),
    [
        ((1.0, 1e-9), TRACE, QUICK, "at load 1e-09 the trace takes .* --load"),
        ((1.0,), replace(TRACE, output_tokens=np.full(len(TRACE), 1 << 40)), QUICK, "answers of the trace"),
        ((1.0,), LONG, replace(QUICK, token_s=1.0), "a replica would work .* --calibration"),
        ((1.0,), LONG, replace(QUICK, token_s=1e-12, overhead_s=1e3), "a replica would work"),
        ((1.0,), LONG, replace(QUICK, token_s=1e-12, weights_s=1e3), "a replica would work"),
        ((1.0,), TRACE, replace(QUICK, token_s=1e3, pair_s=1e3), "a replica would work"),
        ((1.0,), LONG, replace(QUICK, token_s=1e-12, context_token_s=1.0), "a replica would work"),
    ],
)
def test_what_would_not_end_is_refused_before_it_begins(
    loads: tuple[float, ...], trace: Trace, times: ServiceTimes, words: str
) -> None:
    with pytest.raises(ReplayError, match=words):
        run(replace(SWEEP, loads=loads), trace, times)


def test_the_shortest_times_that_a_calibration_may_have_are_replayed() -> None:
    nothing = ServiceTimes(1e-12, 0.0, 0.0, 0.0, 0.0, 32, 4)
    found = run(replace(SWEEP, loads=(1.0,), seeds=1), TRACE, nothing)
    assert [one["requests"] for one in found] == [30, 30]


def test_a_fleet_without_room_for_any_request_has_no_times() -> None:
    found = run(replace(SWEEP, pool_tokens=BLOCK, loads=(1.0,), seeds=2), TRACE, QUICK)
    assert [(one["rejects"], one["ttft_p95_s"], one["hit"]) for one in found] == [(30, None, 0.0)] * 2
