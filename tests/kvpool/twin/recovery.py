"""What the living do for the dead, and what a tidy pass mends.

Reclaiming a slot: its bit leaves every holder word; what it owned is freed, except a block that it was EVICTING, which
goes back to INDEXED, and one it was FREEING, which is finished. Doing it twice is harmless. What was cached stays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tests.kvpool.twin import eviction
from tests.kvpool.twin.memory import Memory
from tests.kvpool.twin.words import State

NO_REQUEST: Final = "(no request)"


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """`blocks`: what was in the dead one's name, by the request that wrote it; its local cache under NO_REQUEST."""

    slot: int
    blocks: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TidyReport:
    """What one pass did: dead processes, free bits set, child counts corrected, blocks indexed late."""

    reclaimed: tuple[Reclaimed, ...]
    restored_bits: int
    recounted: int
    late_indexed: int


def reclaim(memory: Memory, slots: Collection[int]) -> list[Reclaimed]:
    """Gives back what the dead processes of `slots` left; returns what, by slot."""
    found = [Reclaimed(slot, _reclaim_slot(memory, slot)) for slot in sorted(slots)]
    memory.died -= {gone.slot for gone in found}
    return found


def _reclaim_slot(memory: Memory, slot: int) -> dict[str, tuple[int, ...]]:
    lost: dict[str, tuple[int, ...]] = {}
    for number, block in enumerate(memory.blocks):
        block.holders.discard(slot)
        if block.word.owner != slot:
            continue
        if block.state is State.EVICTING:
            block.word = block.word.to(State.INDEXED)
            continue
        label = NO_REQUEST if block.state is State.LOCAL else block.label
        lost[label] = (*lost.get(label, ()), number)
        if block.state is State.FREEING:
            eviction.finish_freeing(memory, number)
        else:
            _forget_half_published(memory, number)
            memory.free(number)
    memory.local.pop(slot, None)
    return lost


def _forget_half_published(memory: Memory, number: int) -> None:
    """A SEALED block may have an entry or have been counted already: its sealer died while publishing it."""
    block = memory.blocks[number]
    if block.state is State.SEALED:
        memory.index.remove(block.key, number)
        memory.recount = True


def tidy(memory: Memory) -> tuple[tuple[Reclaimed, ...], int, int]:
    """Reclaims, puts the free bits right, recounts children; returns who, how many bits were missing, how many counts wrong."""
    reclaimed = tuple(reclaim(memory, memory.died))
    free = set(memory.numbers(State.FREE))
    restored = len(free - memory.free_bits)
    memory.free_bits = free
    recounted = eviction.recount_children(memory) if memory.recount else 0
    return reclaimed, restored, recounted
