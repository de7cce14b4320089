"""Which cached block goes first, and how.

Only idle leaves go: INDEXED, no holder, no indexed child. The one unused for the longest goes first, at equal times
the deeper one; what is left open then is decided by `Memory.prefer`. A parent is a leaf as soon as its last child went.
No heap: the blocks are looked through each time.
"""

from __future__ import annotations

from tests.kvpool.twin.hands import Hands
from tests.kvpool.twin.memory import NO_PARENT, Memory
from tests.kvpool.twin.words import State


def evict(hands: Hands, count: int) -> int:
    """Frees up to `count` idle leaves; returns how many."""
    for done in range(count):
        number = _oldest_leaf(hands.memory)
        if number is None:
            return done
        _evict_block(hands, number)
    return count


def idle_blocks(memory: Memory) -> int:
    """Returns how many blocks eviction can free: all idle ones, because who holds a block holds its parents."""
    return sum(block.idle for block in memory.blocks)


def _oldest_leaf(memory: Memory) -> int | None:
    leaves = [number for number, block in enumerate(memory.blocks) if block.idle and not block.children]
    if not leaves and memory.recount and idle_blocks(memory):
        recount_children(memory)
        return _oldest_leaf(memory)
    return min(leaves, key=lambda number: _rank(memory, number), default=None)


def _rank(memory: Memory, number: int) -> tuple[bool, int, int, bool, int]:
    block = memory.blocks[number]
    later = block.key not in memory.prefer
    return later and not memory.exact_order, block.last_use, -block.depth, later, number


def _evict_block(hands: Hands, number: int) -> None:
    memory = hands.memory
    block = memory.blocks[number]
    block.word = block.word.to(State.EVICTING, hands.slot)
    assert not block.holders, f"block {number} is evicted while slots {block.holders} hold it"
    assert not block.children, f"block {number} is evicted before its {block.children} children"
    block.word = block.word.to(State.FREEING, hands.slot)
    finish_freeing(memory, number)
    hands.counters["evictions"] += 1


def finish_freeing(memory: Memory, number: int) -> None:
    """Takes a FREEING block out of the index and frees it. Its parent's count falls when its entry did go now."""
    block = memory.blocks[number]
    if not memory.index.remove(block.key, number):
        memory.recount = True  # whoever un-indexed it may have died before counting down
    elif block.parent != NO_PARENT:
        memory.blocks[block.parent].children -= 1
    memory.dirty_bits.add(number)
    memory.free(number)


def recount_children(memory: Memory) -> int:
    """Counts every block's indexed children anew; returns how many counts were wrong."""
    true = [0] * memory.capacity
    for number in memory.numbers(State.INDEXED, State.EVICTING):
        if memory.blocks[number].parent != NO_PARENT:
            true[memory.blocks[number].parent] += 1
    wrong = [number for number in memory.numbers(State.INDEXED) if memory.blocks[number].children != true[number]]
    for number in wrong:
        assert memory.blocks[number].children > true[number], f"block {number} counted too few children"
        memory.blocks[number].children = true[number]
    memory.recount = False
    return len(wrong)
