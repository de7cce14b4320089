"""What each part of the tidy pass buys: a small region with that damage, before and after one pass.

The measure is the same for all: how many of the damaged blocks are of no use to a request that needs them.

    reclaim      a request needs the blocks of a dead process; it does not get them
    lost_bits    a request needs free blocks; it gets cached ones, whose content is lost
    children     a request needs the room of the oldest cached blocks; it gets that of younger ones instead
    sealed       a request needs the content of sealed blocks; it does not find it

Before and after are tried out on a region each, because trying may already repair something.

Limits: one damage at a time.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.bench import pool_damage
from cluster.bench.pool_requests import Prompt, hold, prompt, room
from kvpool import BlockGeometry, Pool, PoolError, Region, layout
from kvpool.control import Control

GEOMETRY: Final = BlockGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
BLOCKS: Final = 4096
DAMAGED_BLOCKS: Final = 1000
_PASSES: Final = 3
_DEAD_SLOT: Final = layout.SLOTS - 1

Unusable = Callable[[], int]
"""Counts the damaged blocks that are of no use to a request that needs them."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A region with nothing going on in it but what is done to it here; `ends` closes what stays open meanwhile."""

    pool: Pool
    control: Control
    ends: ExitStack

    def cache(self) -> tuple[Prompt, list[int]]:
        """Caches a prompt of DAMAGED_BLOCKS blocks; returns it, and its blocks."""
        asked = prompt(self.pool, DAMAGED_BLOCKS)
        with hold(self.pool, asked) as table:
            return asked, list(table.blocks)

    def take(self, blocks: int) -> None:
        """A request takes so many blocks and keeps them."""
        table = self.ends.enter_context(self.pool.table("request"))
        if not self.pool.allocate(table, blocks):
            raise PoolError(f"a pool of {BLOCKS} blocks did not give {blocks} of them")


def _reclaim(scene: Scene) -> Unusable:
    scene.take(BLOCKS - DAMAGED_BLOCKS)
    pool_damage.dead_slot(scene.control, _DEAD_SLOT, pool_damage.free_blocks(scene.control))
    return lambda: DAMAGED_BLOCKS - room(scene.pool)


def _lost_bits(scene: Scene) -> Unusable:
    cached, _ = scene.cache()
    scene.take(BLOCKS - 2 * DAMAGED_BLOCKS)
    pool_damage.lose_bits(scene.control, pool_damage.free_blocks(scene.control))
    return lambda: _lost_of(scene, cached)


def _children(scene: Scene) -> Unusable:
    _, oldest = scene.cache()
    younger, _ = scene.cache()
    scene.take(BLOCKS - 2 * DAMAGED_BLOCKS)
    pool_damage.raise_counts(scene.control, oldest)
    return lambda: _lost_of(scene, younger)


def _lost_of(scene: Scene, cached: Prompt) -> int:
    """How many blocks of `cached` go when a request needs as many as are damaged."""
    scene.take(DAMAGED_BLOCKS)
    return len(cached.keys) - scene.pool.peek(cached.keys)


def _sealed(scene: Scene) -> Unusable:
    asked = prompt(scene.pool, DAMAGED_BLOCKS)
    with pool_damage.crowd_index(scene.control):
        scene.ends.enter_context(hold(scene.pool, asked))
    return lambda: DAMAGED_BLOCKS - scene.pool.peek(asked.keys)


PARTS: Final[dict[str, Callable[[Scene], Unusable]]] = {
    "reclaim": _reclaim,
    "lost_bits": _lost_bits,
    "children": _children,
    "sealed": _sealed,
}
"""The parts of the pass; each function does the damage that its part repairs."""


def show(part: str, directory: Path, name: str) -> dict[str, Any]:
    """Unusable blocks before and after one pass over the damage of `part`, and the median time of such a pass, in ms.

    Makes and removes regions `directory`/`name`. Raises PoolError.
    """
    damage = PARTS[part]
    with _scene(directory, name) as scene:
        before = damage(scene)()
    passes = [_passed(damage, directory, name) for _ in range(_PASSES)]
    return {
        "damaged_blocks": DAMAGED_BLOCKS,
        "unusable_before": before,
        "unusable_after": max(after for after, _ in passes),
        "pass_ms": statistics.median(seconds for _, seconds in passes) * 1e3,
    }


def _passed(damage: Callable[[Scene], Unusable], directory: Path, name: str) -> tuple[int, float]:
    """Unusable blocks after a pass over that damage, and its seconds."""
    with _scene(directory, name) as scene:
        unusable = damage(scene)
        begin = time.perf_counter()
        scene.pool.tidy()
        seconds = time.perf_counter() - begin
        return unusable(), seconds


@contextlib.contextmanager
def _scene(directory: Path, name: str) -> Iterator[Scene]:
    with ExitStack() as stack:
        region = Region.create(
            directory, name, GEOMETRY, BLOCKS, bytes(layout.FINGERPRINT_BYTES), random.SystemRandom()
        )
        stack.callback(region.unlink)
        stack.enter_context(region)
        pool = stack.enter_context(Pool.create(region))
        control = region.control()
        stack.callback(control.release)
        yield Scene(pool, control, stack.enter_context(ExitStack()))
