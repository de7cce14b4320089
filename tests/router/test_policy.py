"""Routing decisions: what each policy weighs, and that every decision explains itself."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decision import RouteDecision
from router.policy import POLICIES, _rates, decide
from router.route_config import PolicyName, RouteConfig
from router.view import RouteRequest, View


def view(n: int = 2, **columns: list[float]) -> View:
    """A view of `n` idle, empty replicas at 1,000 tokens/s, with some columns set."""
    defaults: dict[str, list[float]] = {
        "cached_tokens": [0] * n,
        "queued_tokens": [0] * n,
        "running": [0] * n,
        "free_tokens": [100_000] * n,
        "prefill_tokens_per_s": [1000.0] * n,
    }
    chosen: dict[str, Any] = {
        name: np.array(columns.get(name, values), np.float64 if name.endswith("per_s") else np.int64)
        for name, values in defaults.items()
    }
    return View([f"r{index}" for index in range(n)], **chosen)


def route(seen: View, policy: str = "cost", prompt_tokens: int = 1000, turn: int = 0, seed: int = 0) -> RouteDecision:
    return decide(
        RouteRequest(prompt_tokens, turn=turn), seen, RouteConfig(cast(PolicyName, policy)), random.Random(seed)
    )


def test_cost_goes_where_the_prefix_is() -> None:
    decision = route(view(3, cached_tokens=[0, 960, 320]))
    assert decision.replica_id == "r1"
    assert decision.predicted_tokens == 960
    assert decision.reason == "longest cached prefix"
    assert [decision.view.replica_ids[index] for index in decision.order] == ["r1", "r2", "r0"]


def test_cost_leaves_a_holder_whose_queue_costs_more_than_the_prefix_and_what_it_costs_others() -> None:
    for queued, wanted in ((2900, "r0"), (3100, "r1")):
        assert route(view(cached_tokens=[1000, 0], queued_tokens=[queued, 0])).replica_id == wanted
    assert "busier" in route(view(cached_tokens=[1000, 0], queued_tokens=[3100, 0])).reason


def test_siblings_wait_for_a_prefix_that_is_being_computed() -> None:
    """The first one is booked at r0 with all of it to compute; the others are promised 960 of their 1,000 tokens there."""
    assert {route(view(cached_tokens=[960, 0], queued_tokens=[1000, 0], running=[1, 0])).replica_id} == {"r0"}


def test_cost_weighs_a_slow_replica_by_its_own_rate() -> None:
    assert route(view(cached_tokens=[500, 0], prefill_tokens_per_s=[100.0, 1000.0])).replica_id == "r1"


@pytest.mark.parametrize("rates", [[0.0, 900.0], [900.0, 0.0], [800.0, 1000.0], [1000.0, 700.0], [0.0, 0.0]])
def test_equal_replicas_share_new_prefixes_whatever_they_happened_to_measure(rates: list[float]) -> None:
    chosen = Counter(route(view(prefill_tokens_per_s=rates), seed=seed).replica_id for seed in range(200))
    assert min(chosen["r0"], chosen["r1"]) > 60


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=6), st.floats(0, 3), st.integers(0, 5), st.floats(1.001, 100))
def test_a_rate_that_rises_never_makes_a_replica_look_slower(
    measured: list[float], tolerance: float, which: int, factor: float
) -> None:
    config = RouteConfig(rate_tolerance=tolerance)
    which %= len(measured)
    before = _rates(view(len(measured), prefill_tokens_per_s=measured), config)
    raised = [rate * (factor if index == which else 1.0) for index, rate in enumerate(measured)]
    after = _rates(view(len(measured), prefill_tokens_per_s=raised), config)
    assert after[which] >= before[which] * (1 - 1e-9)
    assert (before > 0).all()


def test_cost_counts_running_decodes() -> None:
    assert route(view(running=[30, 0])).replica_id == "r1"


def test_among_equals_cost_displaces_least_then_draws() -> None:
    assert {route(view(free_tokens=[500, 10_000]), seed=seed).replica_id for seed in range(20)} == {"r1"}
    assert {route(view(3), seed=seed).replica_id for seed in range(50)} == {"r0", "r1", "r2"}


def test_affinity_ignores_load_except_among_equals() -> None:
    assert route(view(cached_tokens=[16, 0], queued_tokens=[10**6, 0]), "affinity").replica_id == "r0"
    assert route(view(cached_tokens=[16, 16], queued_tokens=[9, 8]), "affinity").replica_id == "r1"


def test_least_load_ignores_the_cache() -> None:
    assert route(view(cached_tokens=[1000, 0], queued_tokens=[1, 0]), "least_load").replica_id == "r1"


def test_round_robin_takes_turns_whatever_the_order_of_candidates() -> None:
    turns = [route(view(3), "round_robin", turn=turn).replica_id for turn in range(6)]
    assert turns == ["r0", "r1", "r2"] * 2
    shuffled = View(["r2", "r0", "r1"], *(np.zeros(3, np.int64),) * 4, np.ones(3))
    assert [route(shuffled, "round_robin", turn=turn).replica_id for turn in range(3)] == ["r0", "r1", "r2"]


def test_power_of_two_takes_the_less_loaded_of_two_and_never_the_worst_of_three() -> None:
    loaded = view(3, queued_tokens=[100, 200, 300])
    counts = Counter(route(loaded, "power_of_two", seed=seed).replica_id for seed in range(300))
    assert set(counts) == {"r0", "r1"}
    assert counts["r0"] > counts["r1"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(data=st.data())
def test_every_policy_ranks_every_candidate_and_can_say_why(policy: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))

    def column(most: int) -> list[float]:
        return data.draw(st.lists(st.integers(0, most), min_size=n, max_size=n))

    seen = view(
        n,
        cached_tokens=column(4000),
        queued_tokens=column(10**9),
        running=column(1000),
        free_tokens=column(10**6),
        prefill_tokens_per_s=column(10**5),
    )
    decision = route(seen, policy, prompt_tokens=data.draw(st.integers(1, 10**6)), turn=data.draw(st.integers(0, 99)))
    assert sorted(decision.order) == list(range(n))
    assert np.isfinite(decision.score).all()
    assert decision.score[decision.order[0]] == decision.score.min()
    told = json.loads(json.dumps(decision.explain()))
    assert told["replica_id"] == told["candidates"][0]["replica_id"] == decision.replica_id
    assert len(told["candidates"]) == n
    assert policy in decision.header()
    assert "\n" not in decision.header()
    assert "," not in decision.header(), "several of them are joined by commas"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=4), st.integers(0, 30))
def test_reason_and_outcome_of_cost_speak_of_the_replica_that_was_chosen(
    rows: list[tuple[int, int]], seed: int
) -> None:
    """Equal expected times, between which chance decides, are the rule here."""
    seen = view(len(rows), cached_tokens=[32 * row[0] for row in rows], queued_tokens=[32 * row[1] for row in rows])
    decision = route(seen, seed=seed)
    texts = {
        "no_prefix": ["nothing cached and least expected wait"],
        "prefix_hit": ["longest cached prefix"],
        "load_override": ["its holders are busier than computing it again costs", "no slower than its holders"],
    }
    assert decision.reason in texts[decision.outcome]
    assert (decision.predicted_tokens == seen.cached_tokens.max()) == (decision.outcome in ("prefix_hit", "no_prefix"))


def test_cost_says_when_it_is_a_draw_between_waiting_and_computing_again() -> None:
    seen = view(cached_tokens=[1000, 0], queued_tokens=[3000, 0])
    reasons = {route(seen, seed=seed).replica_id: route(seen, seed=seed).reason for seed in range(20)}
    assert reasons == {"r0": "longest cached prefix", "r1": "no slower than its holders"}


def test_what_cannot_be_decided_is_said() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        route(view(0))
    with pytest.raises(ValueError, match="unknown routing policy 'best': choose one of affinity, cost"):
        route(view(1), "best")
    with pytest.raises(ValueError, match="differ in length"):
        View(["a"], *(np.zeros(2, np.int64),) * 4, np.ones(1))
