from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.cost import cost
from router.policy import decide
from router.route_config import RouteConfig
from router.view import RouteRequest, View
from tests.router.views import permuted, route, view, views, with_column

SECONDS = ("queue_s", "prefill_s", "decode_s", "recompute_s", "displaced_s", "balance_s")


def test_it_goes_where_the_prefix_is() -> None:
    decision = route(view(3, cached_tokens=[0, 960, 320]))
    assert decision.replica_id == "r1"
    assert decision.predicted_tokens == 960
    assert decision.reason == "longest cached prefix"
    assert [decision.view.replica_ids[index] for index in decision.order] == ["r1", "r2", "r0"]


def test_it_leaves_a_holder_whose_queue_costs_more_than_the_prefix_and_what_it_costs_others() -> None:
    for queued, wanted in ((1400, "r0"), (1600, "r1")):
        assert route(view(cached_tokens=[1000, 0], queued_tokens=[queued, 0])).replica_id == wanted
    assert "busier" in route(view(cached_tokens=[1000, 0], queued_tokens=[1600, 0])).reason


def test_siblings_wait_for_a_prefix_that_is_being_computed() -> None:
    """The first one is booked at r0 with all of it to compute; the others are promised 960 of their 1,000 tokens there."""
    assert {route(view(cached_tokens=[960, 0], queued_tokens=[1000, 0], running=[1, 0])).replica_id} == {"r0"}


def test_it_weighs_a_slow_replica_by_its_own_rate() -> None:
    decision = route(view(cached_tokens=[500, 0], prefill_tokens_per_s=[100.0, 1000.0]))
    assert decision.replica_id == "r1"
    assert "slower" in decision.reason


@pytest.mark.parametrize("rates", [[0.0, 900.0], [900.0, 0.0], [800.0, 1000.0], [1000.0, 700.0], [0.0, 0.0]])
def test_equal_replicas_share_new_prefixes_whatever_they_happened_to_measure(rates: list[float]) -> None:
    chosen = Counter(route(view(prefill_tokens_per_s=rates), seed=seed).replica_id for seed in range(200))
    assert min(chosen["r0"], chosen["r1"]) > 60


def test_it_counts_running_decodes_by_what_each_adds() -> None:
    assert route(view(running=[30, 0])).replica_id == "r1"
    assert route(view(running=[30, 20], decode_interference_s=[0.01, 0.03])).replica_id == "r0"
    unknown = view(running=[30, 0], decode_interference_s=[math.nan, math.nan])
    assert route(unknown).terms["decode_s"].tolist() == [30 * RouteConfig().decode_interference_s, 0.0]


def test_among_equals_it_draws() -> None:
    assert {route(view(3), seed=seed).replica_id for seed in range(50)} == {"r0", "r1", "r2"}


def test_two_idle_holders_of_a_hot_prefix_share_its_requests() -> None:
    seen = view(3, cached_tokens=[960, 0, 960])
    chosen = Counter(route(seen, seed=seed).replica_id for seed in range(400))
    assert set(chosen) == {"r0", "r2"}
    assert abs(chosen["r0"] - 200) < 50


def test_a_hot_prefix_gets_a_second_holder_as_its_queue_grows() -> None:
    """Requests for one prefix arrive and none is finished: the queue grows until computing it elsewhere is as cheap."""
    cached, queued, waiting = [0, 0], [0, 0], [0, 0]
    chosen = []
    for turn in range(600):
        seen = view(cached_tokens=cached, queued_tokens=queued, waiting=waiting)
        replica = int(route(seen, seed=turn).replica_id[1])
        chosen.append(replica)
        waiting[replica] += 1
        queued[replica] += 1000 - cached[replica]
        cached[replica] = 960
    first = chosen[0]
    assert set(chosen[:40]) == {first}
    assert set(chosen) == {0, 1}
    second = chosen.index(1 - first)
    shares = Counter(chosen[second:])
    assert min(shares.values()) > 0.25 * sum(shares.values()), "both have it from then on"
    assert abs(queued[0] - queued[1]) < 1000 * (1 + RouteConfig().recompute_limit) + 100


class TestDisplaced:
    """What a full pool loses counts by how likely it is to be asked for again."""

    def test_room_that_is_free_costs_nothing(self) -> None:
        seen = view(free_tokens=[1500, 100_000], reuse_share=1.0)
        decision = route(seen, output_tokens=500)
        assert decision.terms["displaced_tokens"].tolist() == [0.0, 0.0]
        assert {route(seen, output_tokens=500, seed=seed).replica_id for seed in range(20)} == {"r0", "r1"}

    def test_what_is_lost_counts_in_seconds(self) -> None:
        decision = route(view(free_tokens=[600, 10_000], reuse_share=0.25), output_tokens=100)
        assert decision.terms["displaced_tokens"].tolist() == [500.0, 0.0]
        assert decision.terms["displaced_s"].tolist() == [0.125, 0.0]
        assert decision.replica_id == "r1"

    def test_what_nobody_asks_for_again_may_go(self) -> None:
        seen = view(free_tokens=[0, 10_000], reuse_share=0.0)
        assert {route(seen, seed=seed).replica_id for seed in range(20)} == {"r0", "r1"}

    def test_the_configured_share_stands_until_one_is_known(self) -> None:
        seen = view(free_tokens=[0, 10_000], reuse_share=math.nan)
        assert route(seen).terms["displaced_s"][0] == pytest.approx(RouteConfig().reuse_share)

    def test_it_can_make_a_holder_dearer_and_says_so(self) -> None:
        seen = view(cached_tokens=[16, 0], free_tokens=[0, 10_000], reuse_share=1.0)
        decision = route(seen)
        assert (decision.replica_id, decision.outcome) == ("r1", "load_override")
        assert "less room" in decision.reason


class TestSession:
    """A hint: it decides among equals and nothing else."""

    def test_equals_keep_a_session_together_wherever_they_stand(self) -> None:
        for session in ("a", "b", "c"):
            chosen = {route(view(8), session=session, seed=seed).replica_id for seed in range(20)}
            shuffled = permuted(view(8), [3, 1, 7, 0, 2, 6, 5, 4])
            chosen |= {route(shuffled, session=session, seed=seed).replica_id for seed in range(20)}
            assert len(chosen) == 1
            assert "session" in route(view(8), session=session).reason

    def test_sessions_spread_evenly(self) -> None:
        chosen = Counter(route(view(4), session=f"chat-{number}").replica_id for number in range(1000))
        assert all(abs(count - 250) < 70 for count in chosen.values())
        assert len(chosen) == 4

    def test_a_replica_that_goes_takes_only_its_own_sessions(self) -> None:
        for number in range(50):
            with_it, without = (route(view(n), session=str(number)).replica_id for n in (5, 4))
            assert with_it in (without, "r4")

    @given(views(), st.text(min_size=1), st.integers(0, 99))
    def test_never_against_the_cost(self, seen: View, session: str, seed: int) -> None:
        chosen = route(seen, prompt_tokens=4000, session=session, seed=seed)
        assert chosen.score[chosen.order[0]] <= chosen.score.min() + RouteConfig().tie_s

    @given(st.text())
    def test_any_text_names_a_session(self, session: str) -> None:
        assert route(view(3), session=session).replica_id in {"r0", "r1", "r2"}
        assert route(view(3), session="\ud800" + session).replica_id in {"r0", "r1", "r2"}


@given(views(), st.integers(0, 10**5))
def test_the_score_is_the_sum_of_its_seconds(seen: View, output_tokens: int) -> None:
    decision = route(seen, prompt_tokens=4000, output_tokens=output_tokens)
    np.testing.assert_allclose(decision.score, sum(decision.terms[name] for name in SECONDS), rtol=1e-12)
    assert all((decision.terms[name] >= 0).all() for name in SECONDS)


@given(views(), st.integers(0, 5), st.integers(1, 10**6), st.integers(0, 99))
def test_a_longer_queue_never_makes_a_replica_more_attractive(seen: View, which: int, more: int, seed: int) -> None:
    which %= len(seen)
    queued = seen.queued_tokens.copy()
    queued[which] += more
    before = route(seen, prompt_tokens=4000, seed=seed)
    after = route(with_column(seen, "queued_tokens", queued), prompt_tokens=4000, seed=seed)
    assert after.score[which] > before.score[which]
    others = np.arange(len(seen)) != which
    np.testing.assert_array_equal(after.score[others], before.score[others])
    assert after.order.index(which) >= before.order.index(which) or before.score[which] <= before.score.min() + 0.001


@pytest.mark.parametrize("name", ["queued_tokens", "cached_tokens", "running", "free_tokens"])
@given(data=st.data())
def test_there_is_no_cliff(name: str, data: st.DataObject) -> None:
    """One token or request more or less changes a score by no more than what it weighs, wherever that is."""
    seen = data.draw(views())
    column = getattr(seen, name)
    moved = column + 1 if name != "cached_tokens" else np.minimum(column + 1, 4000)
    before = route(seen, prompt_tokens=4000, output_tokens=1000)
    after = route(with_column(seen, name, moved), prompt_tokens=4000, output_tokens=1000)
    config = RouteConfig()
    token_s = (1.0 + config.recompute_limit + config.displaced_weight) / before.terms["rate_tokens_per_s"]
    weight_s = np.ones(len(seen)) if name == "running" else token_s
    step = np.abs(after.score - before.score)
    assert (step <= weight_s * (1 + 1e-6) + 1e-6 * np.maximum(before.score, 1.0)).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=4), st.integers(0, 30))
def test_reason_and_outcome_speak_of_the_replica_that_was_chosen(rows: list[tuple[int, int]], seed: int) -> None:
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


def test_it_says_when_it_is_a_draw_between_waiting_and_computing_again() -> None:
    seen = view(cached_tokens=[1000, 0], queued_tokens=[1500, 0])
    reasons = {route(seen, seed=seed).replica_id: route(seen, seed=seed).reason for seed in range(20)}
    assert reasons == {"r0": "longest cached prefix", "r1": "no slower than its holders"}


def test_weights_of_nothing_leave_the_time_to_first_token() -> None:
    config = RouteConfig(recompute_weight=0.0, displaced_weight=0.0)
    seen = view(queued_tokens=[500, 0], running=[0, 5], free_tokens=[0, 0], reuse_share=1.0)
    scored = cost(RouteRequest(1000), seen, config, random.Random(0))
    assert scored.score.tolist() == [1.5, 1.1]
    chosen: Any = {
        decide(RouteRequest(1000), replace(seen), config, random.Random(seed)).replica_id for seed in range(5)
    }
    assert chosen == {"r1"}
