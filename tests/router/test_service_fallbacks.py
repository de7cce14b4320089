"""The service without a picture of the directory, and with parts that are broken: it answers, and never raises."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest

from router.service import LOG_EVERY_S
from tests.router.scene import BOTH, Scene, heard, keys, outcomes, scene_with_prefix

# Fallbacks


@pytest.mark.parametrize(
    ("reason", "scene"),
    [
        ("no directory", Scene(directory=False)),
        ("the directory has not answered yet", Scene()),
    ],
)
def test_without_a_picture_the_least_booked_replica_is_taken(reason: str, scene: Scene) -> None:
    with scene.service.ticket("one", keys(1), 100, 16), scene.service.ticket("two", keys(1), 100, 16):
        first = scene.service.route("one", BOTH)
        assert (first.outcome, first.reason, first.predicted_tokens) == ("fallback", reason, 0)
        assert {first.replica_id, scene.route("two")} == set(BOTH)
        assert first.header() == f"policy=least_load; outcome=fallback; predicted_tokens=0; reason={reason}"
    assert outcomes(scene) == {"fallback": 2}


def test_in_a_fallback_a_started_request_weighs_as_one_that_decodes() -> None:
    scene = Scene(directory=False)
    with (
        scene.service.ticket("long", [], 5000, 16) as long,
        scene.service.ticket("short", [], 100, 16),
        scene.service.ticket("next", [], 100, 16),
    ):
        there, elsewhere = scene.route("long"), scene.route("short")
        assert scene.route("next") == elsewhere
        long.started()
        assert scene.route("next") == there


def test_equals_are_drawn_by_chance() -> None:
    chosen = set()
    for seed in range(20):
        scene = Scene(directory=False, seed=seed)
        with scene.service.ticket("q", [], 100, 16):
            chosen.add(scene.route("q"))
    assert chosen == set(BOTH)


def test_a_silent_directory_is_not_believed() -> None:
    scene = scene_with_prefix()
    scene.now += 4.25
    with scene.service.ticket("q", keys(1), 100, 16):
        assert scene.service.route("q", BOTH).reason == "directory silent for 4.2 s"
    assert scene.service.report()["directory"]["state"] == "silent"
    scene.hear("r0")
    with scene.service.ticket("q", keys(1), 100, 16):
        assert scene.service.route("q", BOTH).outcome == "no_prefix"


def test_a_directory_in_which_no_candidate_is() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1), 100, 16):
        decision = scene.service.route("q", ("r8", "r9"))
    assert (decision.outcome, decision.reason) == ("fallback", "no replica is in the directory")


def test_no_candidates_at_all() -> None:
    for scene in (scene_with_prefix(), Scene(directory=False)):
        with scene.service.ticket("q", keys(1), 100, 16):
            assert scene.service.route("q", ()).ranking == []
        assert scene.service.report()["bookings"] == 0


def test_a_choice_left_to_serve_is_a_fallback() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1), 100, 16) as ticket:
        scene.service.route_failed("q")
        scene.service.routed("q", "r0")
        assert scene.service.requests("r0") == 1
        ticket.admitted("r0", 0)
        assert ticket.decision is not None
        assert "reason=error in the router" in ticket.decision.header()
    scene.service.route_failed("stranger")
    assert outcomes(scene) == {"fallback": 2}


# Never raises


class Broken(Exception):
    pass


def broken(*args: Any, **kwargs: Any) -> Any:
    raise Broken("on purpose")


class BrokenRandom(random.Random):
    def random(self) -> float:
        raise Broken("on purpose")

    def getrandbits(self, bits: int, /) -> int:
        raise Broken("on purpose")


@pytest.mark.parametrize("what", ["pools", "depths", "lag_s"])
def test_a_broken_mirror(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    monkeypatch.setattr(scene.mirror, what, broken)
    live_through(scene, "error in the policy")


def test_a_broken_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    monkeypatch.setattr("router.chooser.decide", broken)
    live_through(scene, "error in the policy")


def test_an_unknown_policy() -> None:
    live_through(scene_with_prefix("best"), "error in the policy")


@pytest.mark.parametrize("what", [["book"], ["see"], ["see", "survey"]])
def test_broken_bookings(what: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    for name in what:
        monkeypatch.setattr(scene.service._ledger._bookings, name, broken)
    live_through(scene, "error in the")


def test_broken_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    for name in scene.metrics.told:
        monkeypatch.setattr(scene.metrics, name, broken)
    live_through(scene, "longest cached prefix", "prefix_hit")


def test_broken_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    monkeypatch.setattr(scene.service._chooser, "_rng", BrokenRandom(1))
    live_through(scene, "error in the policy")


def test_a_broken_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    monkeypatch.setattr(scene.service, "_clock", broken)
    live_through(scene, "longest cached prefix", "prefix_hit")


def test_a_broken_connection() -> None:
    scene = scene_with_prefix()
    scene.service._watch._connected = broken
    live_through(scene, "longest cached prefix", "prefix_hit")
    assert scene.service.report()["directory"]["state"] == "silent"


def test_a_broken_announcement() -> None:
    live_through(heard(Scene(announce=broken)), "longest cached prefix", "prefix_hit")


def live_through(scene: Scene, reason: str, outcome: str = "fallback") -> None:
    """A whole life of a request, of which nothing may raise nor leak."""
    with scene.service.ticket("q", keys(1), 100, 16) as ticket:
        decision = scene.service.route("q", BOTH)
        assert sorted(decision.ranking) == sorted(BOTH)
        assert decision.reason.startswith(reason)
        assert decision.outcome == outcome
        scene.service.routed("q", decision.replica_id)
        ticket.admitted(decision.replica_id, 16)
        ticket.retry()
        ticket.started()
    scene.service.died("r0")
    scene.service.members(["r1"])
    scene.service.route_failed("q")
    scene.service.report_levels()
    report = scene.service.report()
    json.dumps(report, allow_nan=False)
    assert report["bookings"] == 0
    assert scene.service._tickets == {}
    scene.service.route("q", BOTH)  # without a ticket


def test_errors_are_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    scene = scene_with_prefix()
    monkeypatch.setattr("router.chooser.decide", broken)
    with caplog.at_level(logging.WARNING), scene.service.ticket("q", keys(1), 100, 16):
        for _ in range(5):
            scene.route("q")
        assert len(caplog.records) == 1
        scene.now += LOG_EVERY_S
        scene.hear("r0")
        scene.route("q")
        assert len(caplog.records) == 2
