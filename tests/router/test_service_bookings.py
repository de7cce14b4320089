"""What the service books, counts and learns of requests on their way."""

from __future__ import annotations

from typing import Any

import pytest

from router.bookings import LINGER_S, SETTLE_S
from router.route_config import RouteConfig
from tests.router.scene import BLOCK_TOKENS, BOTH, FRESH_S, Scene, keys, outcomes, scene_with_prefix

# Bookings


def test_a_decision_is_load_for_the_next_one_at_once() -> None:
    scene = scene_with_prefix()
    tickets = [scene.service.ticket(f"q{number}", keys(100 + number), 1000, 16) for number in range(6)]
    assert {scene.route("q0"), scene.route("q1")} == set(BOTH)
    chosen = [scene.route(f"q{number}") for number in range(2, 6)]
    assert (chosen.count("r0"), chosen.count("r1")) == (2, 2)
    assert scene.service.report()["bookings"] == 6
    for ticket in tickets:
        ticket.close()
    assert scene.service.report()["bookings"] == 0


def test_what_a_request_computes_is_a_prefix_before_the_directory_knows() -> None:
    scene = scene_with_prefix()
    with (
        scene.service.ticket("first", keys(50, 51, 52), 50, 16) as first,
        scene.service.ticket("next", keys(50, 51, 9), 60, 16),
    ):
        there = scene.route("first")
        predicted = dict(zip(BOTH, scene.service.route("next", BOTH).view.cached_tokens, strict=True))
        assert predicted == {there: 2 * BLOCK_TOKENS, BOTH[there == "r0"]: 0}
        first.started()
        decision = scene.service.route("next", BOTH)
        assert (decision.replica_id, decision.predicted_tokens, decision.outcome) == (there, 32, "prefix_hit")


def test_the_next_turn_finds_its_prefix_though_it_is_faster_than_the_directory() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("first", keys(50, 51, 52), 50, 16) as first:
        there = scene.route("first")
        scene.service.routed("first", there)
        first.started()
    with scene.service.ticket("next", keys(50, 51, 52, 53), 70, 16):
        scene.now += LINGER_S / 2
        decision = scene.service.route("next", BOTH)
        assert (decision.replica_id, decision.predicted_tokens, decision.outcome) == (there, 48, "prefix_hit")
        scene.now += LINGER_S
        scene.service.report_levels()
        assert scene.service.route("next", BOTH).predicted_tokens == 0


@pytest.mark.parametrize("late_s", [0.0, 0.01, 0.3])
def test_a_replica_whose_report_is_older_than_the_end_of_its_work_is_idle(late_s: float) -> None:
    """Short requests one after the other: each report is from the middle of one, and the next must not go elsewhere for it; not
    for one either that was long on its way and comes after the end.
    """
    scene = Scene()
    for replica_id in BOTH:
        scene.hear(replica_id)
    homes = set()
    for number in range(20):
        with scene.service.ticket(f"q{number}", keys(50, 51, number), 40, 16) as ticket:
            homes.add(there := scene.route(ticket.request_id))
            scene.service.routed(ticket.request_id, there)
            scene.now += 0.01
            ticket.admitted(there, 32 if number else 0)
            ticket.started()
            scene.now += 0.01
            if not late_s:
                scene.hear(there, running=1)
            scene.now += 0.01
        if late_s:
            scene.now += late_s
            scene.hear(there, running=1, late_s=0.01 + late_s)
        view = scene.service.explain(keys(50, 51), 40, 16, BOTH).view
        assert view.running.tolist() == view.waiting.tolist() == view.queued_tokens.tolist() == [0, 0]
    assert len(homes) == 1


def test_a_booking_counts_until_a_later_heartbeat_contains_it() -> None:
    scene = Scene()
    scene.hear("r0")
    with scene.service.ticket("q", [], 500, 16), scene.service.ticket("eye", [], 10, 16):
        scene.service.route("q", ("r0",))
        seen = [scene.service.route("eye", ("r0",)).view]
        scene.now += 1.0
        scene.service.routed("q", "r0")
        scene.now += SETTLE_S / 2
        scene.hear("r0")
        seen.append(scene.service.route("eye", ("r0",)).view)
        scene.now += SETTLE_S
        scene.hear("r0", queued_prefill_tokens=300, running=1)
        seen.append(scene.service.route("eye", ("r0",)).view)
        found = [(view.queued_tokens[0], view.running[0], view.waiting[0]) for view in seen]
        assert found == [(500, 0, 1), (500, 0, 1), (300, 1, 0)]


def test_a_request_that_is_decided_again_does_not_compete_with_itself() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1, 2), 1000, 16):
        for _ in range(5):
            decision = scene.service.route("q", BOTH)
            assert decision.replica_id == "r1"
            assert decision.view.queued_tokens.tolist() == [0, 0]
        assert scene.service.report()["bookings"] == 1


def test_the_booking_moves_to_the_replica_that_accepted() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1, 2), 1000, 16) as ticket:
        assert scene.route("q") == "r1"
        scene.service.routed("q", "r0")
        assert (scene.service.requests("r0"), scene.service.requests("r1")) == (1, 0)
        assert ticket.decision is not None
        assert (ticket.decision.replica_id, ticket.decision.outcome) == ("r0", "load_override")
        assert "first choice" in ticket.decision.header()
    assert outcomes(scene) == {"load_override": 1}


def test_a_request_without_a_ticket_is_not_booked() -> None:
    scene = scene_with_prefix()
    decision = scene.service.route("stranger", BOTH)
    assert (decision.outcome, decision.reason) == ("fallback", "the request has no ticket")
    scene.service.routed("stranger", "r0")
    assert scene.service.report()["bookings"] == 0
    assert outcomes(scene) == {"fallback": 1}


def test_a_request_that_left_while_it_was_routed_is_not_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_with_prefix()
    ticket = scene.service.ticket("q", keys(1), 100, 16)

    depths = scene.mirror.depths

    def leave(asked: bytes) -> Any:
        ticket.close()
        return depths(asked)

    monkeypatch.setattr(scene.mirror, "depths", leave)
    scene.service.route("q", BOTH)
    scene.service.routed("q", "r0")
    ticket.admitted("r0", 3)
    assert scene.service.report()["bookings"] == 0


def test_an_id_used_again_belongs_to_the_newer_request() -> None:
    scene = scene_with_prefix()
    old, new = scene.service.ticket("q", keys(1), 100, 16), scene.service.ticket("q", keys(1), 100, 16)
    scene.route("q")
    old.close()
    old.started()
    assert (scene.service.report()["bookings"], new.decision is not None, old.decision) == (1, True, None)
    new.close()
    assert scene.service.report()["bookings"] == 0


def test_after_its_replica_died_a_request_is_decided_again() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1, 2), 100, 16) as ticket:
        assert scene.route("q") == "r1"
        scene.service.routed("q", "r1")
        ticket.admitted("r1", 32)
        scene.service.died("r1")
        assert scene.service.report()["bookings"] == 0
        ticket.retry()
        assert scene.route("q", ("r0",)) == "r0"
        scene.service.routed("q", "r0")
        ticket.admitted("r0", 0)
        ticket.started()
    report = scene.service.report()
    assert (report["bookings"], report["retries"]) == (0, 1)
    assert scene.metrics.told["retried"] == [()]
    # The admission that stood, once: what the client was told.
    assert (report["queried_tokens"], report["predicted_tokens"], report["measured_tokens"]) == (100, 0, 0)
    assert sum(report["decisions"].values()) == 1


def test_replicas_that_left_hold_no_bookings() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1), 100, 16):
        assert scene.route("q") == "r1"
        scene.service.members(["r0"])
        assert scene.service.report()["bookings"] == 0


# Counting


def test_predicted_and_measured_are_counted_together_once_per_request() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1, 2), 100, 16) as ticket:
        scene.route("q")
        scene.service.routed("q", "r1")
        ticket.admitted("r1", 16)
        assert scene.service.report()["measured_tokens"] == 0  # it may still have to begin anew elsewhere
        ticket.started()
        ticket.started()
        ticket.admitted("r1", 16)
    with scene.service.ticket("more", keys(1), 50, 16) as ticket:
        scene.route("more")
        ticket.admitted("r1", 48)
    report = scene.service.report()
    totals = {name: report[f"{name}_tokens"] for name in ("queried", "predicted", "measured", "phantom")}
    assert totals == {"queried": 150, "predicted": 48, "measured": 64, "phantom": 16}
    assert scene.metrics.told["looked_up"] == [(100, 32, 16, 16), (50, 16, 48, 0)]
    assert scene.metrics.told["routed"] == [("prefix_hit",), ("prefix_hit",)]
    assert len(scene.metrics.told["decided"]) == 2


def test_a_request_that_was_never_admitted_has_an_outcome_but_no_tokens() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1), 100, 16):
        scene.route("q")
    with scene.service.ticket("never routed", keys(1), 100, 16):
        pass
    report = scene.service.report()
    assert (sum(report["decisions"].values()), report["queried_tokens"], report["predicted_tokens"]) == (1, 0, 0)


def test_the_outcome_is_that_of_the_decision_that_stood() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1), 100, 16):
        scene.route("q")
        scene.now += FRESH_S + 1.0
        assert scene.service.route("q", BOTH).outcome == "fallback"
    assert outcomes(scene) == {"fallback": 1}
    assert scene.metrics.told["routed"] == [("fallback",)]


def test_what_prompts_in_flight_promise_is_counted_apart_from_what_is_listed() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("first", keys(1, 2, 50, 51), 70, 16) as first:
        assert scene.route("first") == "r1"
        first.admitted("r1", 20)  # 12 of the 32 tokens that are listed are not there
        first.started()
        with scene.service.ticket("next", keys(1, 2, 50, 51), 70, 16) as following:
            assert scene.service.route("next", BOTH).predicted_tokens == 4 * BLOCK_TOKENS
            following.admitted("r1", 40)  # what is listed is there, but of what was promised only a part
            following.started()
    report = scene.service.report()
    names = ("predicted", "promised", "measured", "phantom", "unkept")
    assert [report[f"{name}_tokens"] for name in names] == [32 + 64, 32, 60, 12, 24]
    assert scene.metrics.told["looked_up"] == [(70, 32, 20, 12), (70, 64, 40, 0)]


def test_nothing_is_listed_of_a_candidate_without_a_pool() -> None:
    scene = scene_with_prefix()
    with scene.service.ticket("q", keys(1, 2), 100, 16) as ticket:
        scene.service.route("q", ("new", *BOTH))
        ticket.admitted("new", 0)
    assert scene.metrics.told["looked_up"] == [(100, 0, 0, 0)]


# Learning


def test_the_time_to_the_first_token_is_learned_with_what_the_decision_saw() -> None:
    scene = scene_with_prefix()
    scene.hear("r1", queued_prefill_tokens=30, running=2)
    learned: list[tuple[Any, ...]] = []
    calibration = scene.service._calibration
    scene.service._calibration.note = lambda *seen: learned.append(seen)  # type: ignore[method-assign]
    with scene.service.ticket("q", keys(1, 2, 3, 4), 100, 16) as ticket:
        assert scene.route("q") == "r1"
        scene.now += 0.25
        ticket.admitted("r1", 40)
        scene.now += 0.25
        ticket.started()
        ticket.started()
    with scene.service.ticket("never admitted", keys(1), 100, 16) as ticket:
        scene.route("never admitted")
        ticket.started()
    scene.now += FRESH_S + 1
    with scene.service.ticket("fallback", keys(1), 100, 16) as ticket:
        assert scene.service.route("fallback", BOTH).outcome == "fallback"
        ticket.admitted("r1", 40)
        ticket.started()
    assert learned == [("r1", 30, 60, 2, 0.5)]
    assert calibration.reuse_share > RouteConfig().reuse_share


def test_what_was_learned_is_what_the_policy_sees() -> None:
    scene = scene_with_prefix()
    for number in range(200):
        with scene.service.ticket(f"q{number}", [], 1000, 16) as ticket:
            chosen = scene.route(f"q{number}")
            scene.now += 0.25
            scene.hear("r0")
            scene.hear("r1")
            ticket.admitted(chosen, 0)
            ticket.started()
    with scene.service.ticket("q", [], 1000, 16):
        view = scene.service.route("q", BOTH).view
    assert view.prefill_tokens_per_s.tolist() == pytest.approx([4000.0] * 2, rel=0.1)
    scene.service.members(["r0"])
    assert list(scene.service.report()["calibration"]["factors"]) == ["r0"]
