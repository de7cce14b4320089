"""The service between Serve's router, the ingress and the mirror: what it books, counts, falls back on, and never raises."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.directory import ReplicaLoad
from router.booking_event import BookingEvent, ladder_of
from router.bookings import REMOTE_LIFE_S, SETTLE_S
from router.decision import OUTCOMES, RouteDecision
from router.policy import decide
from router.route_config import RouteConfig
from router.service import LOG_EVERY_S
from router.ticket import Ticket
from router.view import RouteRequest
from tests.fakes.speaker import packed
from tests.router.scene import BLOCK_TOKENS, FRESH_S, Scene, keys

BOTH = ("r0", "r1")


def scene_with_prefix(policy: Any = "cost") -> Scene:
    """Both replicas are idle; r1 holds the keys 1 to 4."""
    return heard(Scene(policy))


def heard(scene: Scene) -> Scene:
    """The scene after the heartbeats of both."""
    scene.hear("r0")
    scene.hear("r1", held=[1, 2, 3, 4])
    return scene


def outcomes(scene: Scene) -> dict[str, int]:
    return {name: count for name, count in scene.service.report()["decisions"].items() if count}


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


# Pools that several replicas share


def shared_scene(policy: Any = "cost", r0: int = 0, r1: int = 0, free_blocks: int = 1000) -> Scene:
    """r0 and r1, with so many prompt tokens queued, share a pool that holds the keys 1 to 4; r2 has one of its own."""
    scene = Scene(policy)
    loads = (ReplicaLoad("r0", queued_prefill_tokens=r0), ReplicaLoad("r1", queued_prefill_tokens=r1))
    scene.hear_shared("node", *loads, held=[1, 2, 3, 4], free_blocks=free_blocks)
    scene.hear("r2")
    return scene


@pytest.mark.parametrize(("r0", "r1", "chosen"), [(300, 0, "r1"), (0, 300, "r0")])
def test_of_two_that_share_a_pool_the_less_loaded_gets_the_prefix(r0: int, r1: int, chosen: str) -> None:
    scene = shared_scene(r0=r0, r1=r1)
    with scene.service.ticket("q", keys(1, 2, 3, 9), 1000, 16):
        decision = scene.service.route("q", ("r0", "r1", "r2"))
    assert (decision.replica_id, decision.outcome) == (chosen, "prefix_hit")
    assert decision.view.cached_tokens.tolist() == [3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, 0]
    assert decision.view.queued_tokens.tolist() == [r0, r1, 0]


def test_each_replica_of_a_shared_pool_has_its_own_load_and_the_room_of_the_pool() -> None:
    scene = Scene()
    loads = (ReplicaLoad("r0", 100, 3, 1, 500.0), ReplicaLoad("r1", 7, 2, 0, 900.0))
    scene.hear_shared("node", *loads, free_blocks=40)
    with scene.service.ticket("q", keys(1), 50, 16):
        view = scene.service.route("q", ("r1", "r0")).view
    assert (view.queued_tokens.tolist(), view.running.tolist()) == ([7, 100], [2, 3])
    assert view.prefill_tokens_per_s.tolist() == pytest.approx([900.0, 500.0])
    assert view.free_tokens.tolist() == [40 * BLOCK_TOKENS] * 2
    assert (view.waiting.tolist(), view.held_tokens.tolist()) == ([0, 1], [0, 0])


def test_when_both_that_share_a_pool_are_busy_the_prefix_is_computed_elsewhere() -> None:
    scene = shared_scene(r0=5000, r1=5000)
    with scene.service.ticket("q", keys(1, 2, 3, 4), 100, 16):
        decision = scene.service.route("q", ("r0", "r1", "r2"))
    assert (decision.replica_id, decision.outcome) == ("r2", "load_override")


def test_requests_with_one_prefix_spread_over_those_that_share_it() -> None:
    scene = shared_scene()
    tickets = [scene.service.ticket(f"q{number}", keys(1, 2, 100 + number), 48, 16) for number in range(6)]
    chosen = [scene.route(f"q{number}", ("r0", "r1")) for number in range(6)]
    assert (chosen.count("r0"), chosen.count("r1")) == (3, 3)
    for ticket in tickets:
        ticket.close()


def test_a_replica_that_leaves_a_shared_pool_goes_and_the_pool_stays() -> None:
    scene = shared_scene()
    scene.hear_shared("node", ReplicaLoad("r1", queued_prefill_tokens=10))
    with scene.service.ticket("q", keys(1, 2), 1000, 16):
        decision = scene.service.route("q", ("r0", "r1", "r2"))
    assert (decision.replica_id, decision.ranking[-1]) == ("r1", "r0")
    cached = dict(zip(decision.view.replica_ids, decision.view.cached_tokens.tolist(), strict=True))
    assert cached == {"r0": 0, "r1": 2 * BLOCK_TOKENS, "r2": 0}


def test_a_prompt_on_its_way_promises_its_blocks_to_its_own_replica_only() -> None:
    """The other one of the pool would not wait for them; once they are sealed, the directory tells of them."""
    scene = shared_scene()
    with scene.service.ticket("q", keys(50, 51, 52), 50, 16), scene.service.ticket("next", keys(50, 51, 9), 60, 16):
        there = scene.route("q", ("r0", "r1"))
        view = scene.service.route("next", ("r0", "r1")).view
    assert dict(zip(view.replica_ids, view.cached_tokens.tolist(), strict=True)) == {
        there: 2 * BLOCK_TOKENS,
        BOTH[there == "r0"]: 0,
    }


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


# Other routers


def test_every_change_of_a_booking_is_announced_in_order() -> None:
    told: list[BookingEvent] = []
    scene = Scene(announce=told.append)
    scene.hear("r0")
    scene.hear("r1", held=[1, 2])
    ladder = ladder_of(packed([1, 2, 9]))
    with scene.service.ticket("q", keys(1, 2, 9), 100, 16) as ticket:
        scene.route("q")
        scene.route("q")  # again: one booking takes the place of the other
        scene.service.routed("q", "r1")  # as booked
        scene.service.routed("q", "r0")
        ticket.admitted("r0", 0)
        ticket.admitted("r0", 16)
        ticket.started()
        ticket.started()
    assert told == [
        BookingEvent("book", "q", "r1", 68, ladder),
        BookingEvent("book", "q", "r1", 68, ladder),
        BookingEvent("book", "q", "r0", 100, ladder),
        BookingEvent("book", "q", "r0", 84, ladder),
        BookingEvent("start", "q"),
        BookingEvent("release", "q"),
    ]


@pytest.mark.parametrize(
    "end",
    [
        lambda scene, ticket: scene.service.died("r1"),
        lambda scene, ticket: scene.service.members(["r0"]),
        lambda scene, ticket: scene.service.route("q", ()),
        lambda scene, ticket: scene.service.route_failed("q"),
        lambda scene, ticket: ticket.retry(),
        lambda scene, ticket: ticket.close(),
    ],
    ids=["died", "left", "no candidates", "left to Serve", "retry", "closed"],
)
def test_the_end_of_a_booking_is_announced_whatever_ends_it(end: Callable[[Scene, Ticket], Any]) -> None:
    told: list[BookingEvent] = []
    scene = Scene(announce=told.append)
    scene.hear("r1", held=[1])
    with scene.service.ticket("q", keys(1), 100, 16) as ticket:
        scene.route("q")
        end(scene, ticket)
        assert [event.kind for event in told] == ["book", "release"]
    assert len(told) == 2


def test_a_broken_announcement() -> None:
    live_through(heard(Scene(announce=broken)), "longest cached prefix", "prefix_hit")


def test_what_other_routers_booked_is_load_and_a_promise() -> None:
    scene = scene_with_prefix()
    book = BookingEvent("book", "theirs", "r0", 400, ladder_of(packed([50, 51, 52])))
    scene.service.apply_remote("there", book)
    with scene.service.ticket("q", keys(50, 51, 9), 60, 16):
        view = scene.service.route("q", BOTH).view
        assert (view.queued_tokens.tolist(), view.waiting.tolist()) == ([400, 0], [1, 0])
        assert view.cached_tokens.tolist() == [2 * BLOCK_TOKENS, 0]
        scene.service.apply_remote("there", BookingEvent("start", "theirs"))
        view = scene.service.route("q", BOTH).view
        assert (view.queued_tokens.tolist(), view.running.tolist()) == ([0, 0], [1, 0])
        assert scene.service.report()["remote_bookings"] == 1
        scene.service.apply_remote("there", BookingEvent("release", "theirs"))
        assert scene.service.route("q", BOTH).view.cached_tokens.tolist() == [0, 0]
    scene.service.apply_remote("there", book)
    scene.service.drop_origin("there")
    assert scene.service.report()["remote_bookings"] == 0


def test_remote_bookings_that_nobody_ends_are_forgotten() -> None:
    scene = scene_with_prefix()
    scene.service.apply_remote("there", BookingEvent("book", "theirs", "r0", 400))
    scene.now += REMOTE_LIFE_S + 1
    scene.service.report_levels()
    assert scene.service.report()["remote_bookings"] == 0


async def test_a_booking_is_waited_for_whoever_makes_it() -> None:
    scene = scene_with_prefix()
    assert not await scene.service.wait_booked("ours", 0.0)
    ours = asyncio.create_task(scene.service.wait_booked("ours", 60.0))
    theirs = asyncio.create_task(scene.service.wait_booked("theirs", 60.0))
    await asyncio.sleep(0)
    with scene.service.ticket("ours", keys(1), 100, 16):
        scene.route("ours")
        scene.service.apply_remote("there", BookingEvent("book", "theirs", "r0", 1))
        assert [await ours, await theirs] == [True, True]
        assert await scene.service.wait_booked("ours", 0.0)


def test_known_blocks_are_those_of_any_live_pool_or_booking() -> None:
    scene = scene_with_prefix()
    asked = packed([1, 2, 3, 9])
    assert scene.service.known_blocks(asked) == 3
    assert scene.service.known_blocks(b"") == 0
    scene.service.apply_remote("there", BookingEvent("book", "theirs", "unheard", 1, ladder_of(packed([50, 51]))))
    assert scene.service.known_blocks(packed([50, 51, 52])) == 2
    scene.now += FRESH_S + 1
    assert scene.service.known_blocks(asked) == 0  # the directory is silent
    assert scene.service.known_blocks(packed([50, 51, 52])) == 2


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
