"""The service where several replicas share a pool."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.directory import ReplicaLoad
from tests.router.scene import BLOCK_TOKENS, BOTH, Scene, keys


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
