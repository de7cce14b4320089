"""Sharing blocks between requests with equal prefixes: finding a chain of keys, and adding to one.

Finding. Hold FIRST, then verify: the state word is INDEXED and unchanged (so it is the same life of the block), its
key is the one looked for, its parent is the block matched before, and its token ids are the expected ones when those
are given. Whatever fails is let go again and counts as a miss; a key that is right with the wrong parent or tokens is
counted as a collision.

Adding. A child is indexed only while its sealer holds the INDEXED parent, so the index is prefix-closed, and whoever
holds a block holds all blocks before it. The parent's child count rises before the child is published. A key that is
indexed already is not indexed again: the sealer moves over to the block that has it, or, when that one has other
tokens, stays private.

Limits: the caller serialises all calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.blocks import Blocks
from kvpool.eviction import DEPTH_SHIFT, PARENT_MASK
from kvpool.index import NOT_FOUND, PrefixIndex
from kvpool.words import INDEXED, NO_SLOT, SEALED, STATE_MASK


class Sharing:
    """Prefix sharing over one region's blocks and index, for one process."""

    __slots__ = ("_blocks", "_index")

    def __init__(self, blocks: Blocks, index: PrefixIndex) -> None:
        self._blocks = blocks
        self._index = index

    def hold_chain(self, keys: Sequence[bytes], tokens: bytes | None, token_bytes: int, now_ns: int) -> list[int]:
        """Returns the blocks of the longest indexed chain of `keys`, each held once more and used at `now_ns`.

        `tokens`: the encoded ids of all of them, `token_bytes` each, to compare; or None.
        """
        held: list[int] = []
        previous = NOT_FOUND
        for key in keys:
            start = len(held) * token_bytes
            expected = None if tokens is None else tokens[start : start + token_bytes]
            previous = self._hold_verified(key, previous, expected, now_ns)
            if previous == NOT_FOUND:
                break
            held.append(previous)
        return held

    def _hold_verified(self, key: bytes, previous: int, tokens: bytes | None, now_ns: int) -> int:
        """Returns the indexed block with this key, parent and (unless None) tokens, held once more; or NOT_FOUND."""
        blocks, control = self._blocks, self._blocks.control
        block = self._index.find(key)
        if block == NOT_FOUND:
            return NOT_FOUND
        word = control.state[block]
        blocks.hold(block)
        if word & STATE_MASK == INDEXED and control.state[block] == word and control.key(block) == key:
            if self._follows(block, previous) and (tokens is None or control.tokens(block) == tokens):
                control.last_use[block] = now_ns
                return block
            blocks.count("hash_collisions")
        blocks.drop(block, control.last_use[block])
        return NOT_FOUND

    def _follows(self, block: int, previous: int) -> bool:
        parent: int = self._blocks.control.parent[block] & PARENT_MASK
        return parent == previous + 1

    def chain_length(self, keys: Sequence[bytes]) -> int:
        """Returns the length of the longest indexed chain of `keys`. Holds and counts nothing."""
        previous = NOT_FOUND
        for position, key in enumerate(keys):
            block = self._index.find(key)
            if block == NOT_FOUND or self._blocks.state(block) != INDEXED or not self._follows(block, previous):
                return position
            previous = block
        return len(keys)

    def seal(self, own: int, parent: int, key: bytes, tokens: bytes, now_ns: int) -> int:
        """Seals the mutable block `own` after `parent` (NOT_FOUND: first block); returns the block that now stands
        for it.

        That is `own`, indexed if it can be; or the block that had the key before, held in place of `own`, which is
        given back.
        """
        blocks, control = self._blocks, self._blocks.control
        linked = parent == NOT_FOUND or blocks.state(parent) == INDEXED
        known = linked and self._index.find(key) != NOT_FOUND
        if known:
            other = self._hold_verified(key, parent, tokens, now_ns)
            if other != NOT_FOUND:
                blocks.count("dedups")
                blocks.drop(own, now_ns)
                return other
        depth = (control.parent[parent] >> DEPTH_SHIFT) + 1 if parent != NOT_FOUND else 0
        control.set_tokens(own, tokens)
        control.set_key(own, key)
        control.parent[own] = depth << DEPTH_SHIFT | (parent + 1)
        control.children[own] = 0
        control.last_use[own] = now_ns
        control.filled[own] = len(tokens) // 4
        blocks.move(own, SEALED, blocks.slot)
        if linked and not known:
            if parent != NOT_FOUND:
                control.children[parent] += 1
            self._index.insert(key, own)
            blocks.move(own, INDEXED, NO_SLOT)
        return own
