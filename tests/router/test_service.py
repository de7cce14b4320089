"""The service between Serve's router, the ingress and the mirror: what it decides when all goes well, and what it tells."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from router.booking_event import BookingEvent
from router.decision import OUTCOMES, RouteDecision
from router.policy import decide
from router.view import RouteRequest
from tests.fakes.speaker import packed
from tests.router.scene import BLOCK_TOKENS, BOTH, FRESH_S, Scene, heard, keys, outcomes, scene_with_prefix

# Decisions


def test_a_request_goes_where_its_prefix_is() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1, 2, 9), 100, 16) as ticket:
        decision = scene.service.route("q", BOTH)
        assert ticket.decision is decision
        assert (decision.replica_id, decision.predicted_tokens) == ("r1", 2 * BLOCK_TOKENS)
        assert (decision.outcome, decision.reason) == ("prefix_hit", "longest cached prefix")
    assert outcomes(scene) == {"prefix_hit": 1}


def test_a_prompt_is_never_predicted_whole() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1, 2), 2 * BLOCK_TOKENS, 16):
        assert scene.service.route("q", BOTH).predicted_tokens == 2 * BLOCK_TOKENS - 1


def test_a_busy_holder_loses_the_request_and_the_outcome_says_so() -> None:
    scene = scene_with_prefix()
    scene.hear("r1", queued_prefill_tokens=5000)
    with scene.service.ticket("q", keys(1, 2, 9), 100, 16):
        decision = scene.service.route("q", BOTH)
    assert (decision.replica_id, decision.outcome) == ("r0", "load_override")
    assert outcomes(scene) == {"load_override": 1}


def test_nothing_cached_anywhere() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(7, 8), 100, 16):
        assert scene.service.route("q", BOTH).outcome == "no_prefix"
    assert outcomes(scene) == {"no_prefix": 1}


def test_a_prompt_shorter_than_a_block_has_no_keys() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", [], 3, 16):
        assert scene.service.route("q", BOTH).outcome == "no_prefix"


def test_a_candidate_without_a_live_pool_comes_last() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1), 100, 16) as ticket:
        decision = scene.service.route("q", ("new", "r0", "other", "r1"))
        assert decision.ranking[:2] == ["r1", "r0"]
        assert sorted(decision.ranking[2:]) == ["new", "other"]
        json.dumps(decision.explain(), allow_nan=False)
        scene.service.routed("q", "new")
        assert ticket.decision is not None
        assert (ticket.decision.replica_id, ticket.decision.predicted_tokens) == ("new", 0)


def test_a_replica_whose_lease_ended_comes_last_however_much_it_holds() -> None:
    scene = scene_with_prefix()
    scene.now += FRESH_S + 0.1
    scene.hear("r0")
    with scene.service.ticket("q", keys(1, 2), 100, 16):
        assert scene.service.route("q", BOTH).ranking == ["r0", "r1"]


def test_a_stale_picture_is_used_as_long_as_it_is_young() -> None:
    scene = scene_with_prefix()
    scene.is_connected = False
    scene.now += FRESH_S - 0.1
    with scene.service.ticket("q", keys(1), 100, 16):
        assert scene.service.route("q", BOTH).outcome == "prefix_hit"
    assert scene.service.report()["directory"]["state"] == "stale"


def test_round_robin_takes_turns_and_a_retried_request_keeps_its_turn() -> None:
    scene = scene_with_prefix("round_robin")
    chosen = []
    for number in range(4):
        with scene.service.ticket(f"q{number}", keys(1), 100, 16):
            chosen.append(scene.route(f"q{number}"))
            assert scene.route(f"q{number}") == chosen[-1]
    assert chosen == ["r0", "r1", "r0", "r1"]


@pytest.mark.parametrize(("old", "new"), [("a", "b"), ("b", "a")])
def test_the_replica_of_two_pools_belongs_to_the_one_heard_last(old: str, new: str) -> None:
    scene = Scene()
    scene.hear("r0", held=[1, 2], pool=old)
    scene.now += 1.0
    scene.hear("r0", held=[1], pool=new)
    with scene.service.ticket("q", keys(1, 2), 100, 16):
        assert scene.service.route("q", ("r0",)).predicted_tokens == BLOCK_TOKENS


# Looking only


def test_explaining_changes_nothing() -> None:
    told: list[BookingEvent] = []
    scene = heard(Scene(announce=told.append))
    before = scene.service.report()
    decision = scene.service.explain(keys(1, 2, 9), 100, 16, BOTH, "s")
    assert (decision.replica_id, decision.predicted_tokens, decision.outcome) == ("r1", 32, "prefix_hit")
    assert (scene.service.report(), told) == (before, [])
    scene.now += FRESH_S + 1
    assert scene.service.explain(b"", 100, 16, BOTH).reason == "directory silent for 4.0 s"
    assert scene.service.explain(b"", 100, 16, ()).ranking == []


def test_the_policy_is_told_the_session_and_how_the_prompt_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    asked: list[RouteRequest] = []

    def listen(request: RouteRequest, *rest: Any) -> RouteDecision:
        asked.append(request)
        return decide(request, *rest)

    monkeypatch.setattr("router.chooser.decide", listen)
    with (
        scene.service.ticket("q", packed([1, 2]), 100, 16, session="s"),
        scene.service.ticket("short", b"", 3, 16),
    ):
        scene.route("q")
        scene.route("short")
    assert asked == [RouteRequest(100, 16, 0, "s", keys(1)[0]), RouteRequest(3, 16, 1, "", b"")]


# Reports


def test_report_has_every_field_and_is_json() -> None:
    for scene in (Scene(directory=False), Scene(), scene_with_prefix()):
        report = json.loads(json.dumps(scene.service.report(), allow_nan=False))
        assert set(report) == {
            *("policy", "directory", "decisions", "bookings", "remote_bookings", "retries", "calibration"),
            *(
                "queried_tokens",
                "predicted_tokens",
                "promised_tokens",
                "measured_tokens",
                "phantom_tokens",
                "unkept_tokens",
            ),
        }
        assert report["decisions"] == dict.fromkeys(OUTCOMES, 0)
        assert set(report["directory"]) == {
            *("state", "lag_s", "lag_entries", "resyncs", "gaps", "digest_mismatches", "problem", "pools"),
        }


def test_levels_are_totals_and_an_endless_lag_counts_from_the_start() -> None:
    scene = Scene()
    scene.now += 7.0
    scene.service.report_levels()
    scene.hear("r0")
    with scene.service.ticket("q", [], 10, 16):
        scene.route("q")
        scene.service.report_levels()
    off = Scene(directory=False)
    off.service.report_levels()
    assert scene.metrics.told["levels"] == [(0, "silent", 7.0, 0, 0), (1, "live", 0.0, 1, 0)]
    assert off.metrics.told["levels"] == [(0, "off", 0.0, 0, 0)]


def test_threads_leave_nothing_behind() -> None:
    """Two threads live through requests while a third routes and kills; the sums end at zero."""
    scene = scene_with_prefix()
    failures: list[BaseException] = []

    def requests(name: str) -> None:
        try:
            for number in range(150):
                request_id = f"{name}{number}"
                with scene.service.ticket(request_id, keys(1, 2, number), 64, 16) as ticket:
                    chosen = scene.route(request_id)
                    scene.service.routed(request_id, chosen)
                    ticket.admitted(chosen, 16)
                    ticket.started()
        except BaseException as error:
            failures.append(error)

    def deaths() -> None:
        for _ in range(150):
            scene.service.died("r0")
            scene.service.report()

    threads = [threading.Thread(target=requests, args=(name,)) for name in ("a", "b")]
    threads.append(threading.Thread(target=deaths))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = scene.service.report()
    assert failures == []
    assert (report["bookings"], sum(report["decisions"].values())) == (0, 300)
    assert (report["queried_tokens"], report["measured_tokens"]) == (300 * 64, 300 * 16)
