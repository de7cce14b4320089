"""Is a region right that nobody changes at the moment: nothing lost, nothing owned twice, every key the right bytes?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kvpool import Pool, Region, words
from kvpool.control import Control
from kvpool.integrity import check_region
from kvpool.stats import region_totals
from kvpool.words import FREE, INDEXED, LOCAL, PARENT_MASK, STATE_MASK
from tests.chaos.content import GEOMETRY, Tokens, block_bytes, histories, key_of


def audit(path: Path, living: set[int]) -> dict[str, int]:
    """Tidies the region at `path` once, whose users hold nothing, and asserts all of that; how many blocks are in which
    state. `living`: slots that may have blocks in their local caches.
    """
    with Region.attach(path) as region, Pool.create(region) as pool:
        pool.tidy()
        control = region.control()
        try:
            counts = _check_blocks(control, living)
            assert check_region(control) == ""
            longest = _check_contents(region, control)
            assert region_totals(control, counts).evicted_while_held == 0
        finally:
            control.release()
        for tokens in longest[:8]:
            _check_found(pool, tokens)
        violation = pool.check_integrity()
        assert violation == "", violation
        if not living:
            assert pool.available() == pool.capacity_blocks
    return counts


def _check_blocks(control: Control, living: set[int]) -> dict[str, int]:
    capacity = control.layout.capacity_blocks
    counts: Counter[str] = Counter()
    children: Counter[int] = Counter()
    for block in range(capacity):
        word = control.state[block]
        state, owner = word & STATE_MASK, words.owner_of(word)
        counts[words.STATE_NAMES.get(state, "?")] += 1
        assert state in (FREE, LOCAL, INDEXED), f"block {block} was left {words.describe(word)}"
        assert (owner in living) if state == LOCAL else (owner == words.NO_SLOT), (
            f"block {block}: {words.describe(word)}"
        )
        assert control.holders[block] == 0, f"block {block} is held by {control.holders[block]:#x}, which nobody does"
        if state == INDEXED and control.parent[block] & PARENT_MASK:
            children[(control.parent[block] & PARENT_MASK) - 1] += 1
    for block in range(capacity):
        if control.state[block] & STATE_MASK == INDEXED:
            counted = control.children[block] & PARENT_MASK
            assert counted == children[block], f"block {block} counts {counted} children, it has {children[block]}"
    return dict(counts)


def _check_contents(region: Region, control: Control) -> list[Tokens]:
    """Every indexed block has the key and the bytes of its history; the histories, longest first."""
    found = []
    for block in range(region.capacity_blocks):
        if control.state[block] & STATE_MASK == INDEXED:
            tokens: Tokens = ()
            at = block
            while at >= 0:
                tokens = (*memoryview(control.tokens(at)).cast("I").tolist(), *tokens)
                at = (control.parent[at] & PARENT_MASK) - 1
            assert control.key(block) == key_of(tokens), f"block {block} has a wrong key"
            size = GEOMETRY.block_bytes
            stored = bytes(region.kv_memory[block * size : (block + 1) * size])
            assert stored == block_bytes(tokens), f"block {block} has wrong bytes"
            found.append(tokens)
    return sorted(found, key=len, reverse=True)


def _check_found(pool: Pool, tokens: Tokens) -> None:
    keys = [key_of(history) for history in histories(tokens)]
    with pool.table("audit") as table:
        assert pool.match(table, keys, list(tokens)) == len(keys)
