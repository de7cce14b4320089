from __future__ import annotations

import random

import pytest

from router.policies.ray_prefix import ray_prefix, ray_prefix_rule
from router.policy import decide
from router.route_config import RouteConfig
from router.view import RouteRequest
from tests.router.views import route, view


def test_those_that_match_most() -> None:
    decision = route(view(3, cached_tokens=[320, 960, 0], running=[0, 50, 0]), "ray_prefix")
    assert (decision.replica_id, decision.outcome) == ("r1", "prefix_hit")
    assert "match most" in decision.reason
    assert set(decision.ranking[1:]) == {"r0", "r2"}


def test_of_several_the_shortest_queue() -> None:
    seen = view(3, cached_tokens=[960, 960, 0], running=[2, 0, 0], waiting=[0, 1, 0])
    assert route(seen, "ray_prefix").replica_id == "r1"


@pytest.mark.parametrize(("matched", "wanted"), [(100, "r0"), (99, "r1")])
def test_less_than_a_tenth_is_no_match_and_the_smallest_tree_gets_it(matched: int, wanted: str) -> None:
    seen = view(3, cached_tokens=[matched, 0, 0], held_tokens=[5000, 10, 20])
    decision = route(seen, "ray_prefix")
    assert decision.replica_id == wanted
    assert ("smallest tree" in decision.reason) == (wanted == "r1")


def test_of_equal_trees_the_shortest_queue() -> None:
    seen = view(3, held_tokens=[10, 10, 0], running=[1, 0, 90])
    assert route(seen, "ray_prefix").ranking == ["r2", "r1", "r0"]
    equal = view(3, held_tokens=[10, 10, 500], running=[4, 3, 0])
    assert route(equal, "ray_prefix").ranking == ["r1", "r0", "r2"]


def test_by_default_no_queue_is_too_long() -> None:
    seen = view(cached_tokens=[960, 0], running=[10**6, 0])
    assert route(seen, "ray_prefix").replica_id == "r0"


@pytest.mark.parametrize(("queue", "is_balanced"), [(10, True), (11, False)])
def test_with_a_threshold_queues_that_differ_too_much_decide(queue: int, is_balanced: bool) -> None:
    rule = ray_prefix_rule(imbalanced_requests=10)
    seen = view(2, cached_tokens=[960, 0], running=[queue, 0])
    scored = rule(RouteRequest(1000), seen, RouteConfig(), random.Random(1))
    assert (scored.score[0] < scored.score[1]) == is_balanced
    assert ("differ" in scored.reason(0, "prefix_hit")) == (not is_balanced)


def test_an_empty_prompt_matches_nothing() -> None:
    decision = decide(RouteRequest(0), view(2, held_tokens=[1, 0]), RouteConfig("ray_prefix"), random.Random(1))
    assert decision.replica_id == "r1"


def test_the_policy_has_the_thresholds_of_ray() -> None:
    seen = view(2, cached_tokens=[100, 0], running=[10**6, 0])
    theirs = ray_prefix_rule()(RouteRequest(1000), seen, RouteConfig(), random.Random(1))
    ours = ray_prefix(RouteRequest(1000), seen, RouteConfig(), random.Random(1))
    assert ours.score.tolist() == theirs.score.tolist() == [10.0**6, 10.0**6 + 1]
