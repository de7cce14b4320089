"""Whole runs of small traces: nothing is lost, nothing is counted twice, the directory is right."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from router.mirror_check import check
from router.replay.simulation import Outcome, Plan, Simulation, config_of
from router.route_config import PolicyName
from tests.router.replay.traces import BLOCK, QUICK, mixed, trace_of

PLAN = Plan("cost", replicas=3, routers=1, pool_tokens=None, lag_s=0.05, seed=1, rate_error=2.0)
TRACE = mixed(21)


def _same(one: Outcome, other: Outcome) -> bool:
    columns = ("replica", "cached_tokens", "ttft_s", "latency_s", "computed_tokens")
    return all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in columns)


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("pool_tokens", [None, 30 * BLOCK])
def test_every_request_is_done_once_or_refused_and_tokens_add_up(policy: PolicyName, pool_tokens: int | None) -> None:
    outcome = Simulation(TRACE, QUICK, replace(PLAN, policy=policy, pool_tokens=pool_tokens, routers=2)).run()
    taken = outcome.replica >= 0
    assert taken.any()
    assert taken.all() == (pool_tokens is None or int(TRACE.input_tokens.max()) + 4 <= pool_tokens)
    assert (np.isnan(outcome.ttft_s) == ~taken).all()
    assert (outcome.latency_s[taken] >= outcome.ttft_s[taken]).all()
    assert (outcome.ttft_s[taken] > 0).all()
    computed = (TRACE.input_tokens - outcome.cached_tokens)[taken]
    assert outcome.computed_tokens.sum() == computed.sum()
    for number in range(PLAN.replicas):
        mine = outcome.replica[taken] == number
        assert outcome.computed_tokens[number] == computed[mine].sum()
    assert outcome.fallbacks == 0
    assert (outcome.evicted_blocks > 0) == (pool_tokens is not None)


@pytest.mark.parametrize("policy", ["cost", "round_robin"])
def test_one_replica_that_keeps_everything_finds_what_can_be_reused(policy: PolicyName) -> None:
    outcome = Simulation(TRACE, QUICK, replace(PLAN, policy=policy, replicas=1)).run()
    assert outcome.cached_tokens.sum() == TRACE.reusable_tokens().sum() > 0
    assert outcome.router_totals["phantom_tokens"] == 0


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    plan = replace(PLAN, policy="power_of_two", routers=2)
    run = Simulation(TRACE, QUICK, plan).run()
    assert _same(run, Simulation(TRACE, QUICK, plan).run())
    assert not _same(run, Simulation(TRACE, QUICK, replace(plan, seed=2)).run())


@pytest.mark.parametrize("pool_tokens", [None, 30 * BLOCK])
def test_the_mirror_ends_with_exactly_the_keys_of_the_pools(pool_tokens: int | None) -> None:
    simulation = Simulation(TRACE, QUICK, replace(PLAN, pool_tokens=pool_tokens))
    simulation.run()
    simulation.rest(2 * PLAN.lag_s + 1.0)
    assert simulation.mirror.counts["digest_mismatches"] == 0
    assert simulation.mirror.counts["gaps"] == 0
    for number, pool in enumerate(simulation.pool_names):
        keys = simulation.keys_of(number)
        assert keys
        difference = check(simulation.mirror, pool, keys)
        assert not difference, difference.describe()


def test_routers_that_hear_of_each_other_at_once_compute_a_prompt_once() -> None:
    row = list(range(12))
    trace = trace_of([row] * 12, gap_s=0.001)
    plan = replace(PLAN, routers=4, replicas=3)
    at_once = Simulation(trace, QUICK, replace(plan, lag_s=0.0)).run()
    late = Simulation(trace, QUICK, replace(plan, lag_s=5.0)).run()
    assert at_once.cached_tokens.sum() > late.cached_tokens.sum()
    assert at_once.cached_tokens.sum() == trace.reusable_tokens().sum()


def test_rates_begin_wrong_by_the_factor_that_is_asked_for() -> None:
    right = config_of(TRACE, QUICK, replace(PLAN, rate_error=1.0))
    wrong = config_of(TRACE, QUICK, PLAN)
    assert wrong.prefill_tokens_per_s == pytest.approx(2 * right.prefill_tokens_per_s)
    assert wrong.decode_interference_s == pytest.approx(right.decode_interference_s / 2)
    assert right.prefill_tokens_per_s == pytest.approx(1 / QUICK.token_s, rel=0.1)


def test_a_replica_whose_steps_are_shorter_than_a_clock_can_tell_has_no_rate() -> None:
    simulation = Simulation(TRACE, QUICK, PLAN)
    simulation.fleet.replicas.rate_tokens[:] = 1e6
    simulation.rest(2.0)
    loads = [load for pool in simulation.mirror.pools(2.0) for load in pool.replicas]
    assert [load.prefill_tokens_per_s for load in loads] == [0.0] * PLAN.replicas
