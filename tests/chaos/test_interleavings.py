"""Interleavings of two or three processes that must come out right, made exactly: one stands at a named step while another
does something.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvpool import Pool, PoolError, Region, layout
from kvpool.kernels.pause import STEPS
from kvpool.process import start_ticks
from kvpool.words import EVICTING, INDEXED, SEALED, STATE_MASK
from tests.chaos import board as rows
from tests.chaos.arena import Arena, Hand
from tests.chaos.audit import audit
from tests.chaos.chaos import WORKERS, begin
from tests.chaos.content import key_of
from tests.chaos.script import tokens_of

if TYPE_CHECKING:
    from tests.chaos.conftest import MakeArena

pytestmark = pytest.mark.slow


def actor(arena: Arena, *lines: str, **more: Any) -> Hand:
    """A worker that performs these lines, one at a time; without a tidy thread unless told otherwise."""
    return arena.spawn(script=lines, **{"tidy_s": 0.0} | more)


def stand(arena: Arena, hand: Hand, line: int, step: str) -> None:
    """Lets `hand` begin a line and stop at a step of it."""
    arena.put(hand, "pause_at", STEPS[step])
    arena.perform(hand, line, wait=False)
    arena.wait_for(lambda: arena.word(hand, "step") == STEPS[step], f"worker {hand.row} to stand at {step!r}")


def let_go_on(arena: Arena, hand: Hand, line: int) -> None:
    """It goes on, and finishes the line."""
    arena.put(hand, "pause_at", 0)
    arena.perform(hand, line)


def states(arena: Arena) -> list[int]:
    """The state of every block."""
    return [word & STATE_MASK for word in arena.control.state]


def unindexed_keys(arena: Arena) -> set[bytes]:
    """Keys of sealed blocks that no block is indexed under."""
    by_state: dict[int, set[bytes]] = {SEALED: set(), INDEXED: set()}
    for block, state in enumerate(states(arena)):
        if state in by_state:
            by_state[state].add(arena.control.key(block))
    return by_state[SEALED] - by_state[INDEXED]


def end(arena: Arena) -> None:
    """The actors' ends, whatever of their scripts is left; and the region is whole."""
    for hand in arena.hands:
        arena.tell(hand, rows.STOP)
    for hand in list(arena.hands):
        arena.wait_for(lambda hand=hand: arena.state(hand) == rows.STOP, "an actor to leave")  # type: ignore[misc]
        assert arena.zygote.reap(hand.pid) == 0
    arena.hands.clear()
    audit(arena.path, set())


@pytest.mark.parametrize("step", ["sealed", "counted", "entered", "held", "indexed"])
@pytest.mark.parametrize("dies", [False, True])
def test_two_seal_one_key_and_one_stands_on_the_way(make_arena: MakeArena, step: str, dies: bool) -> None:
    arena = make_arena(seed=1, capacity_blocks=16)
    one = actor(arena, "run a 0", "run b 01", "check b", "tidy", "check b")
    two = actor(arena, "run c 01", "run d 012", "check c", "check d", "tidy", "check c", "check d")
    arena.perform(one, 0)
    stand(arena, one, 1, step)
    for line in range(4):
        arena.perform(two, line)
    if dies:
        died = arena.kill(one, step)
        arena.perform(two, 4)
        arena.wait_until_reclaimed(one, died)
    else:
        let_go_on(arena, one, 1)
        for line in range(2, 5):
            arena.perform(one, line)
    for line in range(4, 7):
        arena.perform(two, line)
    # Indexed late, or private beside an equal one that is. What follows a private one waits until its request seals again.
    assert len(unindexed_keys(arena)) <= (1 if step in ("entered", "held") else 0)
    end(arena)


def test_a_tidy_pass_takes_no_block_from_a_step_that_reads_it(make_arena: MakeArena) -> None:
    """A step has looked up the blocks of its requests and computes. What it reads must not be given away by the process's own
    tidy thread, even where another process has sealed the same by now.
    """
    arena = make_arena(seed=15, capacity_blocks=12)
    one = actor(arena, "run a 0", "run b 012345", "run c 77")
    two = actor(arena, "run d 012345", "hold d", "tidy", "recheck d")
    stand(arena, one, 0, "entered")
    arena.perform(two, 0)
    arena.perform(two, 1)
    let_go_on(arena, one, 0)
    arena.perform(one, 1)
    arena.perform(two, 2)
    arena.perform(one, 2)  # needs the whole rest of the pool
    try:
        arena.perform(two, 3)
    finally:
        arena.close()


@pytest.mark.parametrize("dies", [False, True])
def test_who_wants_a_block_that_is_being_evicted_goes_on_without_it(make_arena: MakeArena, dies: bool) -> None:
    arena = make_arena(seed=2, capacity_blocks=16)
    evictor = actor(arena, "run a 01", "release a", "evict 1")
    other = actor(arena, "run b 01", "check b", "tidy", "run c 01", "check c")
    for line in range(2):
        arena.perform(evictor, line)
    stand(arena, evictor, 2, "evicting")
    assert states(arena).count(EVICTING) == 1
    arena.perform(other, 0)
    assert [note["matched"] for note in arena.said(other)] == [1]
    arena.perform(other, 1)
    if dies:
        arena.kill(evictor, "evicting")
    else:
        let_go_on(arena, evictor, 2)
    for line in (2, 3, 4):
        arena.perform(other, line)
    assert [note["matched"] for note in arena.said(other) if "matched" in note] == [1, 2]
    end(arena)


def test_who_stands_with_its_hand_on_a_block_keeps_it(make_arena: MakeArena) -> None:
    """Between setting the bit and looking again: an evictor must leave the block alone."""
    arena = make_arena(seed=3, capacity_blocks=16)
    one = actor(arena, "run a 01", "release a", "run b 01", "check b")
    two = actor(arena, "evict 16")
    for line in range(2):
        arena.perform(one, line)
    stand(arena, one, 2, "touched")
    arena.perform(two, 0)
    assert arena.said(two)[-1]["evicted"] == 1  # the second block, which nobody touches yet
    assert states(arena).count(INDEXED) == 1
    let_go_on(arena, one, 2)
    arena.perform(one, 3)
    end(arena)


def test_a_chosen_block_that_somebody_came_to_hold_stays(make_arena: MakeArena) -> None:
    arena = make_arena(seed=16, capacity_blocks=16)
    evictor = actor(arena, "run a 01", "release a", "evict 1")
    other = actor(arena, "run b 01", "check b")
    for line in range(2):
        arena.perform(evictor, line)
    stand(arena, evictor, 2, "chosen")
    arena.perform(other, 0)
    let_go_on(arena, evictor, 2)
    assert arena.said(evictor)[-1]["evicted"] == 0
    arena.perform(other, 1)
    end(arena)


def test_a_chosen_block_that_has_got_a_child_stays(make_arena: MakeArena) -> None:
    arena = make_arena(seed=17, capacity_blocks=16)
    evictor = actor(arena, "run a 01", "release a", "evict 1", "run c 012", "check c")
    other = actor(arena, "run b 012", "release b")
    for line in range(2):
        arena.perform(evictor, line)
    stand(arena, evictor, 2, "chosen")
    for line in range(2):
        arena.perform(other, line)
    let_go_on(arena, evictor, 2)
    assert arena.said(evictor)[-1]["evicted"] == 0  # the child was no candidate yet
    for line in (3, 4):
        arena.perform(evictor, line)
    assert arena.said(evictor)[-1]["matched"] == 3
    end(arena)


@pytest.mark.parametrize("step", ["found", "touched"])
@pytest.mark.parametrize("after", ["run c 34", "run c 34 0", "run c 01", "wait"])
def test_a_block_that_was_found_may_live_another_life(make_arena: MakeArena, step: str, after: str) -> None:
    """It is free, being filled, another prefix or the same one again by the time it is held."""
    arena = make_arena(seed=18, capacity_blocks=16)
    one = actor(arena, "run a 01", "release a", "run b 01", "check b")
    other = actor(arena, "evict 16", after)
    for line in range(2):
        arena.perform(one, line)
    stand(arena, one, 2, step)
    for line in range(2):
        arena.perform(other, line)
    let_go_on(arena, one, 2)
    arena.perform(one, 3)
    end(arena)


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_saw_the_same_free_block(make_arena: MakeArena, first: int) -> None:
    arena = make_arena(seed=19, capacity_blocks=16)
    two = [actor(arena, f"run a{number} {number}{number}", f"check a{number}") for number in range(2)]
    for hand in two:
        stand(arena, hand, 0, "seen_free")
    for number in (first, 1 - first):
        let_go_on(arena, two[number], 0)
    for hand in two:
        arena.perform(hand, 1)
    assert states(arena).count(INDEXED) == 4
    end(arena)


def neighbours(index_entries: int) -> tuple[str, str]:
    """Two blocks whose keys begin to look for a place at the same one."""
    homes: dict[int, str] = {}
    for name in "0123456789abcdefghijklmnopqrstuvwxyz":
        home = int.from_bytes(key_of(tokens_of(name))[:8], "little") % index_entries
        if home in homes:
            return homes[home], name
        homes[home] = name
    raise AssertionError("no two keys have one home")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("steps", [("placing", "placed"), ("placed", "placed"), ("placing", "placing")])
def test_two_enter_one_key_at_two_places(make_arena: MakeArena, first: int, steps: tuple[str, str]) -> None:
    """The first place is taken when one looks, and empty when the other does: both entries are in for a moment."""
    arena = make_arena(seed=20, capacity_blocks=16)
    neighbour, name = neighbours(arena.control.layout.index_entries)
    clearer = actor(arena, f"run x {neighbour}", "release x", "evict 1")
    two = [actor(arena, f"run a {name}", "check a", "tidy", "check a") for _ in range(2)]
    arena.perform(clearer, 0)
    arena.perform(clearer, 1)
    stand(arena, two[0], 0, "placing")
    arena.perform(clearer, 2)
    stand(arena, two[1], 0, steps[1])
    if steps[0] != "placing":
        arena.put(two[0], "pause_at", STEPS[steps[0]])
        arena.wait_for(lambda: arena.word(two[0], "step") == STEPS[steps[0]], "the first one to go on")
    for number in (first, 1 - first):
        let_go_on(arena, two[number], 0)
    for line in (1, 2, 3):
        for hand in two:
            arena.perform(hand, line)
    assert unindexed_keys(arena) == set()
    assert states(arena).count(INDEXED) == 1
    end(arena)


@pytest.mark.parametrize("step", ["counted", "unindexed"])
def test_a_recount_that_meets_a_change_is_made_again(make_arena: MakeArena, step: str) -> None:
    """A death leaves a count too high; whoever counts anew is overtaken by a new child, and must not forget the rest."""
    arena = make_arena(seed=4, capacity_blocks=16)
    dead = actor(arena, "run a 01", "release a", "evict 1", "run b 02")
    counter = actor(arena, "run c 0", "tidy", "tidy")
    other = actor(arena, "run d 03")
    arena.perform(dead, 0)
    arena.perform(counter, 0)
    if step == "counted":
        stand(arena, dead, 3, step)
    else:
        arena.perform(dead, 1)
        stand(arena, dead, 2, step)
    died = arena.kill(dead, step)
    stand(arena, counter, 1, "recounting")
    arena.wait_until_reclaimed(dead, died)
    arena.perform(other, 0)
    let_go_on(arena, counter, 1)
    arena.perform(counter, 2)
    end(arena)


def test_who_dies_counting_children_anew_does_not_take_the_wish_along(make_arena: MakeArena) -> None:
    arena = make_arena(seed=5, capacity_blocks=16)
    dead = actor(arena, "run a 0", "run b 01")
    counter = actor(arena, "tidy")
    other = actor(arena, "run c 0", "tidy", "release c", "evict 16")
    arena.perform(dead, 0)
    stand(arena, dead, 1, "counted")
    arena.perform(other, 0)
    arena.kill(dead, "counted")
    stand(arena, counter, 0, "recounting")
    arena.kill(counter, "recounting")
    for line in (1, 2, 3):
        arena.perform(other, line)
    assert arena.said(other)[-1]["evicted"] == 1
    end(arena)


def test_a_chain_of_reclaimers_that_die(make_arena: MakeArena) -> None:
    """Each dies while it gives back what the one before it had."""
    arena = make_arena(seed=6, capacity_blocks=32)
    chain = [actor(arena, f"run a{number} {number}1{number} 2", "tidy") for number in range(5)]
    last = actor(arena, "tidy")
    for hand in chain:
        arena.perform(hand, 0)
    arena.kill(chain[0], "anywhere")
    for before, hand in pairwise(chain):
        stand(arena, hand, 1, "reclaiming")
        assert arena.is_signed_by(before)
        arena.kill(hand, "reclaiming")
    arena.perform(last, 0)
    assert arena.said(last)[-1]["tidied"]
    assert not any(arena.is_signed_by(hand) for hand in chain)
    end(arena)


def test_a_stopped_reclaimer_does_not_keep_others_from_their_work(make_arena: MakeArena) -> None:
    """It has the lock of the dead one's slot; nobody needs that to go on."""
    arena = make_arena(seed=7)
    begin(arena)
    dead = arena.catch("sealed", arena.hands)
    living = [hand for hand in arena.hands if hand is not dead]
    for hand in living:
        arena.put(hand, "pause_at", STEPS["reclaiming"])
    died = arena.kill(dead, "sealed")
    stopped = arena.catch("reclaiming", living)
    others = [hand for hand in living if hand is not stopped]
    before = arena.counts(others)
    arena.wait_for(lambda: all(now > before[row] + 50 for row, now in arena.counts(others).items()), "the others")
    assert arena.is_signed_by(dead)
    arena.put(stopped, "pause_at", 0)
    arena.wait_until_reclaimed(dead, died)
    arena.audit()
    arena.end()


def test_a_stopped_tidy_thread_does_not_keep_the_dead_in_their_slots(make_arena: MakeArena) -> None:
    """Whoever has the job is stopped: what dies meanwhile is given back all the same."""
    arena = make_arena(seed=8)
    begin(arena)
    arena.wait_for(lambda: bool(leaders(arena, rows.LEADS_TIDY)), "somebody to tidy")
    (leader,) = leaders(arena, rows.LEADS_TIDY)
    arena.stop(leader)
    victim = next(hand for hand in arena.hands if hand is not leader)
    arena.kill(victim, "anywhere")
    arena.wait_for(lambda: not arena.is_signed_by(victim), "the dead one to be reclaimed", timeout_s=3)
    arena.go_on(leader)
    arena.audit()
    arena.end()


def leaders(arena: Arena, role: int) -> list[Hand]:
    """The workers that have had a job."""
    return [hand for hand in arena.hands if arena.board.get(hand.row, rows.ROLES) & role]


@pytest.mark.parametrize("role", [rows.LEADS_PUBLISHER, rows.LEADS_TIDY])
def test_another_one_takes_over_the_job_of_a_dead_one(make_arena: MakeArena, role: int) -> None:
    arena = make_arena(seed=9)
    begin(arena)
    for _ in range(WORKERS - 1):
        arena.wait_for(lambda: bool(leaders(arena, role)), "somebody to take the job")
        (leader,) = leaders(arena, role)
        died = arena.kill(leader, "leader")
        arena.wait_until_reclaimed(leader, died)
    arena.audit()
    arena.end()


def test_the_creator_dies(make_arena: MakeArena) -> None:
    arena = make_arena(seed=10, create=False)
    creator = arena.spawn(create_blocks=arena.capacity_blocks)
    arena.open()
    begin(arena, WORKERS - 1)
    died = arena.kill(creator, "creator")
    arena.wait_until_reclaimed(creator, died)
    arena.audit()
    arena.end()


def test_all_die_at_once_and_the_next_one_adopts_what_they_left(make_arena: MakeArena) -> None:
    arena = make_arena(seed=11)
    for steps in (["entered", "freeing"], ["evicting", "counted"]):
        begin(arena)
        standing: list[Hand] = []
        for step in steps:
            standing.append(arena.catch(step, [hand for hand in arena.hands if hand not in standing]))
        for hand in list(arena.hands):
            os.kill(hand.pid, signal.SIGKILL)
        for hand in list(arena.hands):
            arena.zygote.reap(hand.pid)
        arena.hands.clear()
        arena.let_go()
        region = Region.adopt(
            arena.path, geometry=arena.geometry, fingerprint=arena.fingerprint, owner=bytes(layout.OWNER_BYTES)
        )
        assert region is not None
        region.close()
        arena.open()
        assert audit(arena.path, set())["INDEXED"] > 0


def test_a_pid_that_lives_again_is_not_the_dead_one(make_arena: MakeArena) -> None:
    """Slots are told apart by locks. One signed with the pid of a living process is reclaimed when its own is dead; one
    signed with a pid that nobody has is left alone while its process lives.
    """
    arena = make_arena(seed=12)
    begin(arena, 3)
    victim, survivor, _ = arena.hands
    slot = arena.slot(victim)
    generation = arena.word(survivor, "generation")
    arena.put(survivor, "pid", 2**22 + 1)  # above every pid
    arena.put(victim, "pid", os.getpid())
    arena.put(victim, "start_time", start_ticks(os.getpid()))
    died = arena.kill(victim, "pid reuse")
    arena.wait_for(lambda: arena.control.slots[slot * layout.SLOT_WORD_COUNT] == 0, "the dead one's slot")
    arena.reclaim_s.append(time.monotonic() - died)
    before = arena.counts([survivor])[survivor.row]
    arena.wait_for(lambda: arena.counts([survivor])[survivor.row] > before + 50, "the survivor")
    assert (arena.word(survivor, "pid"), arena.word(survivor, "generation")) == (2**22 + 1, generation)
    arena.audit()
    arena.end()


def test_a_forked_child_does_not_keep_its_dead_parents_slot(make_arena: MakeArena) -> None:
    arena = make_arena(seed=13, capacity_blocks=16)
    parent = actor(arena, "run a 012", "fork")
    other = actor(arena, "wait", tidy_s=0.3)
    arena.perform(other, 0)
    arena.perform(parent, 0)
    arena.perform(parent, 1)
    child = arena.said(parent)[-1]["forked"]
    try:
        died = arena.kill(parent, "anywhere")
        arena.wait_until_reclaimed(parent, died)
        os.kill(child, 0)  # and it lives
    finally:
        os.kill(child, signal.SIGKILL)
    end(arena)


def test_sixty_four_slots_and_no_more(make_arena: MakeArena) -> None:
    """The last slot's bit is the sign of the word. And a slot that is signed by a dead process is as good as a free one."""
    arena = make_arena(seed=14, capacity_blocks=300)
    filler = [Region.attach(arena.path) for _ in range(layout.SLOTS - 2)]
    pools = [Pool.create(region) for region in filler]
    try:
        before_last = actor(arena, "run a 01", "line 7", "release a", "evict 1")
        last = actor(arena, "run b 01", "check b", "run c 22", "line 5", "release b", "release c", "tidy")
        assert arena.slot(last) == layout.SLOTS - 1
        with Region.attach(arena.path) as one_more, pytest.raises(PoolError, match="64 processes use"):
            Pool.create(one_more)
        for line in range(4):
            arena.perform(last, line)
        for line in range(2):
            arena.perform(before_last, line)
        assert arena.control.header[layout.HEADER_WORDS["demand"]] == 3 << 62
        died = arena.kill(last, "anywhere")
        with Region.attach(arena.path) as one_more, Pool.create(one_more) as pool:
            assert pool.slot == layout.SLOTS - 1
            assert arena.control.header[layout.HEADER_WORDS["demand"]] == 1 << 62
            assert pool.stats().blocks["sealed"] == 0
        assert died
        for line in (2, 3):
            arena.perform(before_last, line)
    finally:
        for pool, region in zip(pools, filler, strict=True):
            pool.close()
            region.close()
    end(arena)
