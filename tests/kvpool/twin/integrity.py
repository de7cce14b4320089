"""Is the twin what it claims to be? Looked at from all processes at once, which no real process can.

Unlike the real check this one knows who is dead and not reclaimed yet: their words may stand for requests that nobody
has any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tests.kvpool.twin.hands import Hands
from tests.kvpool.twin.memory import NO_PARENT, Memory
from tests.kvpool.twin.table import TwinTable
from tests.kvpool.twin.words import State


def check(memory: Memory, alive: Collection[tuple[Hands, Collection[TwinTable]]]) -> str:
    """Returns '' or the first violation. `alive`: every living process with its open tables."""
    return _check_blocks(memory) or _check_index(memory) or _check_requests(memory, alive)


def _check_blocks(memory: Memory) -> str:
    if sum(memory.counts().values()) != memory.capacity:
        return f"blocks by condition {memory.counts()} do not sum to {memory.capacity}"
    if memory.numbers(State.EVICTING, State.FREEING) and not memory.died:
        return f"blocks {memory.numbers(State.EVICTING, State.FREEING)} were left half evicted"
    if memory.free_bits != set(memory.numbers(State.FREE)):
        return f"free bits {sorted(memory.free_bits)} are set, blocks {memory.numbers(State.FREE)} are free"
    local = sorted(number for cache in memory.local.values() for number in cache)
    if local != memory.numbers(State.LOCAL):
        return f"blocks {memory.numbers(State.LOCAL)} are local, the caches have {local}"
    for slot, cache in memory.local.items():
        if any(memory.blocks[number].word.owner != slot for number in cache):
            return f"the local cache {cache} of slot {slot} has another slot's block"
    return ""


def _check_index(memory: Memory) -> str:
    indexed = memory.numbers(State.INDEXED, State.EVICTING)
    if sorted(memory.index.listed()) != indexed:
        return f"the index lists {sorted(memory.index.listed())}, indexed are {indexed}"
    children: Counter[int] = Counter()
    for number in indexed:
        block = memory.blocks[number]
        if memory.index.find(block.key) != number:
            return f"block {number} is indexed but not found under its key"
        if block.parent != NO_PARENT:
            children[block.parent] += 1
            if block.parent not in indexed or memory.blocks[block.parent].depth + 1 != block.depth:
                return f"block {number} is indexed but its parent {block.parent} is not, or not one depth above"
    for number in indexed:
        known = memory.blocks[number].children
        if known < children[number] or (known > children[number] and not memory.recount):
            return f"block {number} counts {known} children, it has {children[number]}"
    return ""


def _check_requests(memory: Memory, alive: Collection[tuple[Hands, Collection[TwinTable]]]) -> str:
    exclusive: dict[int, str] = {}
    for hands, tables in alive:
        held = Counter(number for table in tables for number in table.held())
        if held != +hands.refs:
            return f"slot {hands.slot} counts {dict(+hands.refs)}, its tables hold {dict(held)}"
        for number, times in held.items():
            block = memory.blocks[number]
            if block.state is State.INDEXED:
                if hands.slot not in block.holders:
                    return f"slot {hands.slot} holds indexed block {number} without its bit"
            elif block.state not in (State.MUTABLE, State.SEALED) or block.word.owner != hands.slot or times > 1:
                return f"block {number} is {block.word} but slot {hands.slot} holds it {times} times"
            elif number in exclusive:
                return f"block {number} is owned twice, by {exclusive[number]} and slot {hands.slot}"
            else:
                exclusive[number] = f"slot {hands.slot}"
        bits = {number for number, block in enumerate(memory.blocks) if hands.slot in block.holders}
        if not bits <= set(held):
            return f"slot {hands.slot} has bits on {sorted(bits - set(held))}, which it does not hold"
    living = {hands.slot for hands, _ in alive} | memory.died
    for number in memory.numbers(State.MUTABLE, State.SEALED):
        owner = memory.blocks[number].word.owner
        if number not in exclusive and owner not in memory.died:
            return f"block {number} is {memory.blocks[number].word} but no request holds it: it is lost"
    if any(block.holders - living for block in memory.blocks):
        return "a holder word has the bit of a slot that nobody has"
    return ""
