"""`RouteService.explain`: the decision that would be made, and that looking changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from router.policy import POLICIES
from tests.router.scene import Scene, keys

NAMES = ("r0", "r1", "r9")


@pytest.fixture
def scene() -> Scene:
    """r0 lists three blocks, r1 none; no pool speaks for r9."""
    built = Scene()
    built.hear("r0", held=[1, 2, 3])
    built.hear("r1")
    return built


def terms(scene: Scene, name: str, **asked: Any) -> dict[str, float]:
    """One term by candidate, of a prompt of six blocks."""
    decision = scene.service.explain(keys(1, 2, 3, 4, 5, 6), 100, 10, NAMES, **asked)
    return dict(zip(decision.view.replica_ids, decision.terms[name].tolist(), strict=True))


def test_it_is_the_decision_that_is_made(scene: Scene) -> None:
    told = scene.service.explain(keys(1, 2, 3), 60, 10, NAMES)
    with scene.service.ticket("a", keys(1, 2, 3), 60, 10):
        made = scene.service.route("a", NAMES)
    assert (told.replica_id, told.reason, told.outcome) == (made.replica_id, made.reason, made.outcome)
    assert (told.ranking, told.predicted_tokens) == (made.ranking, made.predicted_tokens)
    assert told.terms.keys() - made.terms.keys() == {"matched_tokens", "promised_tokens"}
    for name, column in made.terms.items():
        assert told.terms[name].tolist() == pytest.approx(column.tolist(), nan_ok=True)


def test_what_the_directory_lists_is_told_apart_from_what_is_promised(scene: Scene) -> None:
    with scene.service.ticket("on its way", keys(1, 2, 3, 4, 5), 80, 10):
        assert scene.route("on its way") == "r0"
        matched, promised = terms(scene, "matched_tokens"), terms(scene, "promised_tokens")
    assert (matched["r0"], promised["r0"]) == (48, 32)
    assert (matched["r1"], promised["r1"]) == (0, 0)
    assert math.isnan(matched["r9"])
    assert math.isnan(promised["r9"])
    assert terms(scene, "promised_tokens")["r0"] == 0


def test_the_last_token_is_never_matched(scene: Scene) -> None:
    decision = scene.service.explain(keys(1, 2, 3), 48, 10, NAMES)
    assert decision.terms["matched_tokens"][0] == decision.predicted_tokens == 47


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_is_explained_with_every_candidate(policy: Any) -> None:
    scene = Scene(policy)
    scene.hear("r0", held=[1, 2, 3])
    scene.hear("r1")
    told = scene.service.explain(keys(1, 2, 3), 60, 10, NAMES, "a session").explain()
    assert {one["replica_id"] for one in told["candidates"]} == set(NAMES)
    assert told["candidates"][-1]["replica_id"] == "r9"
    assert told["candidates"][-1]["score"] is None
    assert all(one["matched_tokens"] is not None for one in told["candidates"][:-1])


def test_looking_changes_nothing(scene: Scene) -> None:
    def state() -> dict[str, Any]:
        report = scene.service.report()
        return {name: report[name] for name in report if name != "directory"} | scene.metrics.told

    before = {name: str(value) for name, value in state().items()}
    for _ in range(5):
        scene.service.explain(keys(1, 2, 3), 60, 10, NAMES)
    assert {name: str(value) for name, value in state().items()} == before
    with scene.service.ticket("a", keys(1, 2, 3), 60, 10):
        assert scene.route("a") == "r0"


def test_turns_are_not_used_up() -> None:
    scene = Scene("round_robin")
    for name in ("r0", "r1"):
        scene.hear(name)

    def routed(request_id: str) -> str:
        with scene.service.ticket(request_id, keys(1), 20, 10):
            return scene.route(request_id)

    first = routed("a")
    scene.service.explain(keys(1), 20, 10, ("r0", "r1"))
    assert routed("b") != first
    assert routed("c") == first


def test_a_fallback_says_why(scene: Scene) -> None:
    scene.now += 100.0
    told = scene.service.explain(keys(1), 20, 10, NAMES)
    assert (told.outcome, told.policy) == ("fallback", "least_load")
    assert "silent" in told.reason
    assert set(told.ranking) == set(NAMES)
    assert Scene(directory=False).service.explain(keys(1), 20, 10, NAMES).reason == "no directory"
