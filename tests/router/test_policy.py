"""What holds of the ranking, whatever the policy. What each policy weighs is in `policies/`."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import POLICIES, decide
from router.route_config import PolicyName, RouteConfig
from router.view import RouteRequest, View
from tests.router.views import permuted, route, view, views

DRAWING = {"power_of_two"}
"""Those that draw candidates by their place in the view: another order, another draw."""


def test_every_policy_can_be_configured() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(data=st.data())
def test_every_policy_ranks_every_candidate_and_can_say_why(policy: str, data: st.DataObject) -> None:
    seen = data.draw(views())
    request: dict[str, Any] = {
        "prompt_tokens": data.draw(st.integers(4000, 10**6)),
        "turn": data.draw(st.integers(0, 99)),
        "output_tokens": data.draw(st.integers(0, 10**5)),
        "session": data.draw(st.text(max_size=3)),
        "prefix": data.draw(st.binary(max_size=2)),
    }
    decision = route(seen, policy, **request)
    assert sorted(decision.order) == list(range(len(seen)))
    assert np.isfinite(decision.score).all()
    tie_s = RouteConfig().tie_s if policy == "cost" else 0.0
    ranked = decision.score[list(decision.order)]
    assert (np.diff(ranked) >= -tie_s).all()
    assert ranked[0] <= ranked.min() + tie_s
    told = json.loads(json.dumps(decision.explain(), allow_nan=False))
    assert told["replica_id"] == told["candidates"][0]["replica_id"] == decision.replica_id
    assert len(told["candidates"]) == len(seen)
    assert told["score_unit"]
    assert set(decision.terms) <= set(told["candidates"][0])
    assert policy in decision.header()
    assert "\n" not in decision.header()
    assert "," not in decision.header(), "several of them are joined by commas"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(data=st.data())
def test_a_decision_is_a_pure_function(policy: str, data: st.DataObject) -> None:
    seen = data.draw(views())
    before = {name: column.copy() for name, column in seen.columns().items()}
    first, second = (route(seen, policy, prompt_tokens=4000, session="s", prefix=b"p", seed=7) for _ in range(2))
    assert (first.order, first.reason, first.explain()) == (second.order, second.reason, second.explain())
    for name, column in seen.columns().items():
        np.testing.assert_array_equal(column, before[name])


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - DRAWING))
@given(data=st.data())
def test_the_order_of_the_candidates_does_not_matter(policy: str, data: st.DataObject) -> None:
    seen = data.draw(views())
    order = data.draw(st.permutations(range(len(seen))))
    request: dict[str, Any] = {"prompt_tokens": 4000, "turn": 3, "prefix": b"p"}
    one, other = route(seen, policy, **request), route(permuted(seen, order), policy, **request)
    np.testing.assert_allclose(other.score, one.score[list(order)], rtol=1e-9)
    winner = seen.replica_ids.index(other.replica_id)
    tie_s = RouteConfig().tie_s if policy == "cost" else 0.0
    best = float(one.score.min())
    assert one.score[winner] <= best + tie_s + 1e-9 * max(1.0, abs(best))


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"round_robin"}))
def test_what_is_equal_is_shared_evenly(policy: str) -> None:
    """Nothing cached anywhere and equal loads: each of five is chosen one time in five."""
    chosen = Counter(route(view(5), policy, seed=seed).replica_id for seed in range(1000))
    assert len(chosen) == 5
    # Five standard deviations of a fair draw; for the ring, whose shares differ by up to a fifth, more.
    spread = 63 if policy != "chwbl" else 103
    assert all(abs(count - 200) < spread for count in chosen.values())


def test_what_cannot_be_decided_is_said() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        route(view(0))
    with pytest.raises(ValueError, match="unknown routing policy 'best': choose one of affinity, chwbl, cost"):
        route(view(1), "best")


def test_a_view_of_a_thousand_is_ranked_without_a_look_at_each() -> None:
    """As many draws of random numbers as for one candidate, and no call for each of them."""

    class Counting(random.Random):
        calls = 0

        def getrandbits(self, k: int, /) -> int:
            self.calls += 1
            return super().getrandbits(k)

    for n in (1, 1024):
        rng = Counting(1)
        decision = decide(RouteRequest(100), view(n), RouteConfig("cost"), rng)
        assert rng.calls == 1
        assert sorted(decision.order) == list(range(n))


def test_candidates_of_which_less_is_known_stand_for_themselves() -> None:
    """Columns that are left out say so, and a decision can be made without them."""
    zeros, ones = np.zeros(2, np.int64), np.ones(2)
    seen = View(["a", "b"], zeros, zeros, zeros, zeros, ones)
    assert np.isnan(seen.decode_interference_s).all()
    assert math.isnan(seen.reuse_share)
    for policy in POLICIES:
        assert route(seen, policy).replica_id in {"a", "b"}
    assert route(replace(seen, running=np.array([3, 0]))).replica_id == "b"
