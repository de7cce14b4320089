"""The scenes that both the short and the long run play, and what each must leave behind."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvpool.kernels.pause import STEPS
from tests.chaos import board as rows
from tests.chaos.arena import Arena, Hand

WORKERS = 4
COMMON = [step for step in STEPS if step not in ("reclaiming", "reclaimed", "recounting", "in_line")]
"""Steps that requests come to by themselves, all the time."""
STAND_S = 1.0
"""More than three periods of a tidy thread."""


def begin(arena: Arena, workers: int = WORKERS) -> None:
    """Starts the workers."""
    for _ in range(workers):
        replace(arena)
    arena.bring(arena.hands, rows.RUN)


def replace(arena: Arena) -> None:
    """A new worker, at random with a floor, or in guard mode."""
    arena.spawn(
        wait=False, floor_blocks=arena.rng.choice((0, 0, 4)), guard=arena.rng.random() < 0.2, meddles=arena.meddles
    )


def come_to(arena: Arena, step: str, among: Iterable[Hand]) -> Hand:
    """One of them stands at this step; what is needed for it is arranged."""
    chosen = list(among)
    if step in ("reclaiming", "reclaimed"):
        # Somebody must have died who had a block, and the next one to notice must be one whom we watch.
        dead = arena.catch("sealed", chosen)
        chosen.remove(dead)
        for hand in chosen:
            arena.put(hand, "pause_at", STEPS[step])
        arena.kill(dead, "bystander")
    elif step == "recounting":
        arena.want_recount()
    return arena.catch(step, chosen)


def kill_at(arena: Arena, step: str) -> None:
    """One worker is killed at `step`; another one gives back what it had. Every other time a new one comes before that."""
    victim = come_to(arena, step, arena.hands)
    died = arena.kill(victim, step)
    early = arena.rng.random() < 0.5
    if early:
        replace(arena)
    arena.wait_until_reclaimed(victim, died, by_threads=not early and not arena.meddles)
    _fill_up(arena)


def kill_anywhere(arena: Arena) -> None:
    """One worker is killed at no matter which instruction; now and then two at once, or while it is stopped."""
    number = 2 if arena.rng.random() < 0.2 else 1
    victims = arena.rng.sample(arena.hands, number)
    time.sleep(arena.rng.random() * 0.02)
    if arena.rng.random() < 0.2:
        arena.stop(victims[0])
    deaths = [(victim, arena.kill(victim, "anywhere")) for victim in victims]
    early = arena.rng.random() < 0.5
    if early:
        replace(arena)
    for victim, died in deaths:
        arena.wait_until_reclaimed(victim, died, by_threads=not early and not arena.meddles)
    _fill_up(arena)


def stand_at(arena: Arena, steps: Iterable[str]) -> None:
    """A worker stands at each of these steps for several tidy periods, all at the same time, and goes on afterwards. What
    it has stays its own, and the others get on meanwhile. The first worker is spared where it can be, so that it can
    tell what calls take.
    """
    standing: list[Hand] = []
    for step in steps:
        # Whoever does it for all may be the first one.
        spared = arena.hands[:1] if step in COMMON else []
        standing.append(come_to(arena, step, [hand for hand in arena.hands if hand not in standing + spared]))
    _stand(arena, standing)
    for hand in standing:
        arena.put(hand, "pause_at", 0)
    _get_on(arena, standing)
    _fill_up(arena)


def stop_anywhere(arena: Arena, number: int = 1) -> None:
    """The same with SIGSTOP, at no matter which instruction."""
    stopped = arena.rng.sample(arena.hands[1:], number)
    for hand in stopped:
        arena.stop(hand)
    _stand(arena, stopped)
    for hand in stopped:
        arena.go_on(hand)
    _get_on(arena, stopped)


def _stand(arena: Arena, standing: list[Hand]) -> None:
    going = [hand for hand in arena.hands if hand not in standing]
    signatures = {hand.row: (arena.word(hand, "pid"), arena.word(hand, "generation")) for hand in standing}
    owned = {hand.row: _owned(arena, hand) for hand in standing}
    until = time.monotonic() + STAND_S
    while time.monotonic() < until:
        _get_on(arena, going)
    for hand in standing:
        assert signatures[hand.row] == (arena.word(hand, "pid"), arena.word(hand, "generation"))
        assert owned[hand.row] == _owned(arena, hand), "what a living process has was taken from it"


def _get_on(arena: Arena, going: list[Hand]) -> None:
    """Each of them does at least 20 operations more."""
    before = arena.counts(going)
    arena.wait_for(
        lambda: all(count >= before[row] + 20 for row, count in arena.counts(going).items()),
        f"workers {[hand.row for hand in going]} to get on",
    )


def _owned(arena: Arena, hand: Hand) -> tuple[list[tuple[int, int]], list[int]]:
    """Blocks in the name of its slot with their words, and blocks that it holds."""
    slot = arena.slot(hand)
    state, holders = arena.control.state, arena.control.holders
    mine = [(block, state[block]) for block in range(arena.capacity_blocks) if state[block] >> 8 & 0xFF == slot + 1]
    return mine, [block for block in range(arena.capacity_blocks) if holders[block] >> slot & 1]


def _fill_up(arena: Arena) -> None:
    while len(arena.hands) < WORKERS:
        replace(arena)
    arena.wait_for(lambda: all(arena.state(hand) == rows.RUN for hand in arena.hands), "all workers to make requests")
