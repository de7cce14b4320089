"""Finding a chain of keys, and adding to one.

Finding holds first and verifies then: state, key, parent, and the tokens when they are given. Adding indexes a block
only when its parent is indexed and its key is not; the sealer of a key that is there moves over to the block that has
it, unless that one has other tokens or another parent: then its own stays SEALED and private for good. One whose window
in the index is full stays SEALED too, and what follows it, until `index_late` finds room.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.kvpool.twin.hands import Hands
from tests.kvpool.twin.index import NOT_FOUND
from tests.kvpool.twin.memory import NO_PARENT
from tests.kvpool.twin.words import State


def hold_chain(hands: Hands, keys: Sequence[bytes], tokens: Sequence[int] | None, now_ns: int) -> list[int]:
    """Returns the blocks of the longest chain, each held once more and used now. `tokens` None: not compared."""
    held: list[int] = []
    size = hands.memory.block_tokens
    for position, key in enumerate(keys):
        expected = None if tokens is None else tuple(tokens[position * size : (position + 1) * size])
        number = _hold_verified(hands, key, held[-1] if held else NO_PARENT, expected, now_ns)
        if number == NOT_FOUND:
            break
        held.append(number)
    return held


def _hold_verified(hands: Hands, key: bytes, parent: int, tokens: tuple[int, ...] | None, now_ns: int) -> int:
    number = hands.memory.index.find(key)
    if number == NOT_FOUND:
        return NOT_FOUND
    block = hands.memory.blocks[number]
    used = block.last_use
    hands.hold(number)
    if block.state is State.INDEXED and block.key == key:
        if block.parent == parent and tokens in (None, block.tokens):
            block.last_use = now_ns
            return number
        hands.counters["hash_collisions"] += 1
    hands.drop((number,), used)
    return NOT_FOUND


def chain_length(hands: Hands, keys: Sequence[bytes]) -> int:
    """Returns the length of the longest indexed chain. Holds and counts nothing; compares parents, not tokens."""
    parent = NO_PARENT
    for position, key in enumerate(keys):
        number = hands.memory.index.find(key)
        if number == NOT_FOUND or hands.memory.blocks[number].state is not State.INDEXED:
            return position
        if hands.memory.blocks[number].parent != parent:
            return position
        parent = number
    return len(keys)


def seal(hands: Hands, own: int, parent: int, key: bytes, tokens: tuple[int, ...], now_ns: int) -> int:
    """Seals `own` after `parent`; returns the block that stands for it now: itself, or the one that had the key."""
    block = hands.memory.blocks[own]
    block.key, block.tokens, block.filled = key, tokens, len(tokens)
    block.private, block.children, block.last_use = False, 0, now_ns
    block.word = block.word.to(State.SEALED, hands.slot)
    return _add(hands, own, parent, now_ns)


def index_late(hands: Hands, sealed: list[int], now_ns: int) -> int:
    """Tries again with the sealed blocks of one table, which is changed where it moves over; how many it could."""
    done = 0
    parent = NO_PARENT
    for position, own in enumerate(sealed):
        block = hands.memory.blocks[own]
        if block.state is State.SEALED:
            if block.private:
                break
            sealed[position] = _add(hands, own, parent, now_ns)
            if hands.memory.blocks[sealed[position]].state is not State.INDEXED:
                break
            done += 1
        parent = sealed[position]
    return done


def _add(hands: Hands, own: int, parent: int, now_ns: int) -> int:
    """Indexes a SEALED block of ours if that can be; returns the block that stands for it."""
    memory = hands.memory
    block = memory.blocks[own]
    if parent != NO_PARENT and memory.blocks[parent].state is not State.INDEXED:
        return own
    if memory.index.find(block.key) == NOT_FOUND:
        block.parent, block.depth = parent, 0 if parent == NO_PARENT else memory.blocks[parent].depth + 1
        _publish(hands, own)
        return own
    other = _hold_verified(hands, block.key, parent, block.tokens, now_ns)
    if other == NOT_FOUND:
        block.private = True
        return own
    hands.counters["dedups"] += 1
    hands.drop((own,), now_ns)
    return other


def _publish(hands: Hands, number: int) -> None:
    """Parent's count, entry, our bit, state: in this order, so that nobody can find a block that nobody holds."""
    memory = hands.memory
    block = memory.blocks[number]
    if not memory.index.insert(block.key, number):
        return
    if block.parent != NO_PARENT:
        memory.blocks[block.parent].children += 1
    block.holders.add(hands.slot)
    block.word = block.word.to(State.INDEXED)
    memory.dirty_bits.add(number)
