"""Is the pool what it claims to be? The first violation in words, or nothing.

Checked, from one standstill of the pool: the six conditions of a block sum to the capacity; free bits agree with
states; every index entry points to an INDEXED block and every INDEXED block is found under its key; parents of
indexed blocks are indexed, one depth above, and know at least that many children; private reference counts agree with
the holder bits, with the open tables and with the running counts; no block is in two tables unless it is INDEXED, and
none is twice in one.

Limits: the caller holds the pool's lock. Everything over all blocks is vectorised (about 10 ms for 100,000 blocks);
what is per table is a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from kvpool import words
from kvpool.block_table import BlockTable
from kvpool.blocks import Blocks
from kvpool.eviction import DEPTH_SHIFT, PARENT_MASK
from kvpool.index import PrefixIndex
from kvpool.layout import INDEX_TOMBSTONE
from kvpool.stats import count_blocks
from kvpool.words import FREE, INDEXED, LOCAL, MUTABLE, SEALED


def check(blocks: Blocks, index: PrefixIndex, tables: Collection[BlockTable]) -> str:
    """Returns '' or the first violation. Mutates nothing."""
    return (
        _check_states(blocks)
        or _check_free_bits(blocks)
        or _check_index(blocks, index)
        or _check_parents(blocks)
        or _check_holders(blocks, tables)
        or _check_tables(blocks, tables)
        or _check_running_counts(blocks)
    )


def _check_states(blocks: Blocks) -> str:
    counts = count_blocks(blocks)
    capacity = len(blocks.refs)
    if sum(counts.values()) != capacity:
        return f"blocks by condition {counts} do not sum to the capacity {capacity}"
    state = _states(blocks)
    passing = np.flatnonzero((state == words.EVICTING) | (state == words.FREEING))
    if passing.size:
        return f"block {passing[0]} was left {words.describe(blocks.control.state[passing[0]])}"
    for block in blocks.local:
        word = blocks.control.state[block]
        if word & words.STATE_MASK != LOCAL or words.owner_of(word) != blocks.slot:
            return f"block {block} is in the local cache of slot {blocks.slot} but is {words.describe(word)}"
    return ""


def _states(blocks: Blocks) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return blocks.control.array("state") & np.uint64(words.STATE_MASK)


def _check_running_counts(blocks: Blocks) -> str:
    counts = count_blocks(blocks)
    for name, counted, running in (
        ("free", counts["free"], blocks.free),
        ("local", counts["local"], len(blocks.local)),
        ("cached", counts["cached"], blocks.idle),
    ):
        if counted != running:
            return f"{counted} blocks are {name} by their states, {running} by the running count"
    return ""


def _check_free_bits(blocks: Blocks) -> str:
    packed = blocks.control.array("free").view(np.uint8)
    bits = np.unpackbits(packed, bitorder="little")
    capacity = len(blocks.refs)
    wrong = np.flatnonzero(bits[:capacity] != (_states(blocks) == FREE))
    if wrong.size:
        block = int(wrong[0])
        return f"block {block} has free bit {bits[block]} but is {words.describe(blocks.control.state[block])}"
    if bits[capacity:].any():
        return "a free bit beyond the last block is set"
    return ""


def _check_index(blocks: Blocks, index: PrefixIndex) -> str:
    entries = blocks.control.array("index")
    number = (entries & np.uint64(PARENT_MASK)).astype(np.int64)
    positions = np.flatnonzero((number != 0) & (entries != INDEX_TOMBSTONE))
    tombstones = int(np.count_nonzero(entries == INDEX_TOMBSTONE))
    if tombstones != index.tombstones or positions.size != index.live:
        return (
            f"the index has {positions.size} live entries and {tombstones} tombstones, "
            f"by its counts {index.live} and {index.tombstones}"
        )
    named = number[positions] - 1
    if named.size and int(named.max()) >= len(blocks.refs):
        return f"an index entry points beyond the last block, to {int(named.max())}"
    state = _states(blocks)
    stray = named[state[named] != INDEXED]
    if stray.size:
        return f"the index points to block {stray[0]}, which is {words.describe(blocks.control.state[stray[0]])}"
    indexed = np.flatnonzero(state == INDEXED)
    if not np.array_equal(np.sort(named), indexed):
        odd = np.setxor1d(named, indexed)
        return f"block {odd[0] if odd.size else named[0]} is INDEXED and in the index a different number of times"
    return _check_probes(blocks, positions, named)


def _check_probes(
    blocks: Blocks,
    positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    named: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> str:
    """Each entry must carry its key's tag, with no empty entry between where probing for the key starts and the
    entry.
    """
    entries = blocks.control.array("index")
    keys = blocks.control.array("key")[named]
    mask = len(entries) - 1
    start = (keys[:, 0] & np.uint64(mask)).astype(np.int64)
    empty_before = np.concatenate(([0], np.cumsum(np.tile(entries == 0, 2))))
    end = np.where(positions < start, positions + len(entries), positions)
    tag = keys[:, 1] & np.uint64(0xFFFFFFFF)
    lost = (empty_before[end] != empty_before[start]) | (entries[positions] >> np.uint64(32) != tag)
    if lost.any():
        return f"block {named[np.flatnonzero(lost)[0]]} is INDEXED but a probe for its key does not reach it"
    if len(np.unique(keys, axis=0)) != len(keys):
        return "two INDEXED blocks have one key"
    return ""


def _check_parents(blocks: Blocks) -> str:
    control = blocks.control
    state = _states(blocks)
    rows = np.flatnonzero(state == INDEXED)
    word = control.array("parent")[rows]
    parent = (word & np.uint64(PARENT_MASK)).astype(np.int64) - 1
    depth = (word >> np.uint64(DEPTH_SHIFT)).astype(np.int64)
    if (parent >= len(blocks.refs)).any() or ((parent < 0) != (depth == 0)).any():
        return "an INDEXED block has a damaged parent word"
    below = parent >= 0
    orphan = rows[below][state[parent[below]] != INDEXED]
    if orphan.size:
        return f"block {orphan[0]} is INDEXED but its parent is not: the index is not prefix-closed"
    above = (control.array("parent")[parent[below]] >> np.uint64(DEPTH_SHIFT)).astype(np.int64)
    if (above + 1 != depth[below]).any():
        return "an INDEXED block is not one deeper than its parent"
    children = np.bincount(parent[below], minlength=len(blocks.refs))
    short = np.flatnonzero((state == INDEXED) & (control.array("children").astype(np.int64) < children))
    if short.size:
        block = int(short[0])
        return f"block {block} counts {control.children[block]} children, it has {children[block]}"
    return ""


def _check_holders(blocks: Blocks, tables: Collection[BlockTable]) -> str:
    true_refs = Counter(block for table in tables for block in table.held())
    for block, refs in enumerate(blocks.refs):
        if refs != true_refs.get(block, 0):
            return f"block {block} has {refs} holders by its count, {true_refs.get(block, 0)} by the open tables"
    refs_array = np.array(blocks.refs)
    bit = (blocks.control.array("holders") >> np.uint64(blocks.slot) & np.uint64(1)).astype(bool)
    wrong = np.flatnonzero(bit != (refs_array > 0))
    if wrong.size:
        return (
            f"block {wrong[0]} has {blocks.refs[wrong[0]]} holders here, its bit of slot {blocks.slot} says otherwise"
        )
    if blocks.held != np.count_nonzero(refs_array):
        return f"{np.count_nonzero(refs_array)} blocks are held, {blocks.held} by the running count"
    state = _states(blocks)
    unheld = np.flatnonzero(((state == MUTABLE) | (state == SEALED)) & (refs_array == 0))
    if unheld.size:
        what = words.describe(blocks.control.state[unheld[0]])
        return f"block {unheld[0]} is {what} but no request holds it: it is lost"
    return ""


def _check_tables(blocks: Blocks, tables: Collection[BlockTable]) -> str:
    seen: dict[int, str] = {}
    for table in tables:
        if table.closed:
            return f"the table of {table.request_id!r} is closed but still counted as open"
        held = table.held()
        if len(set(held)) != len(held):
            return f"a block is twice in the table of {table.request_id!r}"
        for block in held:
            if block in seen and blocks.state(block) != INDEXED:
                what = words.describe(blocks.control.state[block])
                return f"block {block} is {what} but {seen[block]!r} and {table.request_id!r} both hold it"
            if blocks.state(block) not in (MUTABLE, SEALED, INDEXED):
                what = words.describe(blocks.control.state[block])
                return f"block {block} is in the table of {table.request_id!r} but is {what}"
            seen[block] = table.request_id
        for position, key in enumerate(table.keys):
            if blocks.control.key(table.blocks[position]) != key:
                return f"position {position} of {table.request_id!r} has another key than its block"
    return ""
