"""Chaos on one region: workers that make requests on a pool too small for them are stopped and killed, at every named step
of the kernels and at random instructions. Afterwards nothing is lost, nothing owned twice, every key has its bytes, and no
survivor has waited for anybody.

The short run kills at every step once; the long one (`make soak`) hundreds of times. Both are seeded; what interleaves
how is the machine's choice.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvpool.kernels.pause import STEPS
from tests.chaos import chaos
from tests.chaos.arena import Arena

if TYPE_CHECKING:
    from tests.chaos.conftest import MakeArena

Property = Callable[[str, object], None]

RECLAIM_S = 1.0
"""From death to reclaim."""
NOISE_S = 2.0
"""What a busy machine may add to the worst of them."""
SHORT_STANDS = (("evicting", "touched"), ("entered",), ("freeing", "chosen"))
BUSY_P99_US = 2000.0
"""What 99 of 100 calls may compute: ten times what they do. Who spun until a stopped process got on would be far above it."""
LONG_KILLS = 320


def report(arena: Arena, record: Property) -> None:
    """Prints what was measured, and asserts what must hold of it."""
    reclaim = sorted(arena.reclaim_s) or [0.0]
    times = arena.times_us()
    print(f"seed {arena.seed}: {sum(arena.kills.values())} kills {arena.kills}")
    print(f"reclaimed by a tidy thread after: median {statistics.median(reclaim):.3f} s, worst {reclaim[-1]:.3f} s")
    for kind, (p50, p99, most) in times.items():
        print(f"a call of the pool ({kind}): p50 {p50:.0f} us, p99 {p99:.0f} us, worst {most:.0f} us")
    record("kills", sum(arena.kills.values()))
    record("reclaim_s", (statistics.median(reclaim), reclaim[-1]))
    record("call_us", times)
    assert times["busy"][1] <= BUSY_P99_US
    assert statistics.median(reclaim) <= RECLAIM_S
    assert reclaim[-1] <= RECLAIM_S + NOISE_S


@pytest.mark.slow
def test_a_death_at_any_step_costs_nothing(make_arena: MakeArena, record_property: Property) -> None:
    arena = make_arena(seed=random.randrange(1 << 32))
    chaos.begin(arena)
    steps = list(STEPS)
    arena.rng.shuffle(steps)
    for number, step in enumerate(steps):
        chaos.kill_at(arena, step)
        if number % 7 == 6:
            arena.audit()
    arena.end()
    report(arena, record_property)
    assert set(arena.kills) == {*STEPS, "bystander"}


@pytest.mark.slow
def test_who_stands_still_hinders_nobody_and_loses_nothing(make_arena: MakeArena, record_property: Property) -> None:
    arena = make_arena(seed=random.randrange(1 << 32))
    chaos.begin(arena)
    for steps in SHORT_STANDS:
        chaos.stand_at(arena, steps)
    chaos.stop_anywhere(arena, 2)
    chaos.kill_anywhere(arena)
    arena.audit()
    arena.end()
    report(arena, record_property)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_hundreds_of_deaths(make_arena: MakeArena, record_property: Property) -> None:
    arena = make_arena(seed=random.randrange(1 << 32), capacity_blocks=70)
    begun = time.monotonic()
    chaos.begin(arena)
    steps = list(STEPS)
    scene = 0
    while sum(arena.kills.values()) < LONG_KILLS or scene < 3 * len(steps):
        scene += 1
        if scene % 25 == 0:
            arena.meddles = not arena.meddles
        if scene % 2:
            chaos.kill_at(arena, steps[scene // 2 % len(steps)])
        else:
            chaos.kill_anywhere(arena)
        if scene % 5 == 0:
            chaos.stand_at(arena, [steps[scene // 5 % len(steps)]] if scene % 10 else arena.rng.sample(chaos.COMMON, 2))
        if scene % 17 == 0:
            chaos.stop_anywhere(arena, arena.rng.randint(1, 3))
        if scene % 10 == 0:
            arena.audit()
    arena.end()
    print(f"{time.monotonic() - begun:.0f} s")
    report(arena, record_property)
