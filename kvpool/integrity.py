"""Is the pool what it claims to be? The first violation in words, or nothing.

Of the region: states are states; free bits agree with them; every index entry points to a block that may have one, and
every INDEXED block is found under its key, once; parents of indexed blocks are indexed, one depth above, and count at
least that many children. Of this process: its private reference counts agree with its holder bits, its blocks and its
open tables; no block is in two tables unless it is INDEXED, and none is twice in one; its local cache is what its slot
says.

Other processes and threads go on meanwhile, so one look may see the middle of somebody's step. A violation counts only if it is
there, in the same words, at every one of `LOOKS` looks.

Limits: everything over all blocks is vectorised (about 10 ms for 100,000 blocks); what is
per table is a loop. A process that is stopped in the middle of a step makes a lasting "violation" of that step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool import layout, words
from kvpool.block_table import BlockTable
from kvpool.control import Control
from kvpool.kernels.context import Context
from kvpool.words import (
    DEPTH_SHIFT,
    EVICTING,
    FREE,
    FREEING,
    INDEXED,
    LOCAL,
    MUTABLE,
    PARENT_MASK,
    SEALED,
    STATE_MASK,
    STATE_NAMES,
)

LOOKS: Final = 4
_PAUSE_S: Final = 0.002
_ENTERED: Final = (SEALED, INDEXED, EVICTING, FREEING)


def check(control: Control, context: Context, slot: int, tables: Collection[BlockTable], alone: bool) -> str:
    """Returns '' or the first violation. Mutates nothing. `alone`: no other process has a slot. `tables` is read anew at every
    look, because other threads open and release tables meanwhile.
    """
    found = ""
    for look in range(LOOKS):
        if look:
            time.sleep(_PAUSE_S)
        before, found = found, _look(control, context, slot, list(tables), alone)
        if not found or (look and found != before):
            return ""
    return found


def check_region(control: Control) -> str:
    """Returns '' or the first violation of a region that nobody changes meanwhile, without looking at any process."""
    state = _states(control)
    return (
        _check_states(control, state, True)
        or _check_free_bits(control, state)
        or _check_index(control, state)
        or _check_parents(control, state)
    )


def _look(control: Control, context: Context, slot: int, tables: Collection[BlockTable], alone: bool) -> str:
    state = _states(control)
    return (
        _check_states(control, state, alone)
        or _check_free_bits(control, state)
        or _check_index(control, state)
        or _check_parents(control, state)
        or _check_tables(control, slot, tables)
        or _check_holders(control, context, slot, state, tables)
        or _check_local(control, slot, state)
    )


def _states(control: Control) -> npt.NDArray[np.int64]:
    return (control.array("state") & np.uint64(STATE_MASK)).astype(np.int64)


def _check_states(control: Control, state: npt.NDArray[np.int64], alone: bool) -> str:
    known = [number for number in STATE_NAMES if not alone or number not in (EVICTING, FREEING)]
    odd = np.flatnonzero(~np.isin(state, known))
    if odd.size:
        return f"block {odd[0]} was left {words.describe(control.state[odd[0]])}"
    return ""


def _check_free_bits(control: Control, state: npt.NDArray[np.int64]) -> str:
    bits = np.unpackbits(control.array("free").view(np.uint8), bitorder="little")
    capacity = len(state)
    wrong = np.flatnonzero(bits[:capacity] != (state == FREE))
    if wrong.size:
        block = int(wrong[0])
        return f"block {block} has free bit {bits[block]} but is {words.describe(control.state[block])}"
    if bits[capacity:].any():
        return "a free bit beyond the last block is set"
    return ""


def _check_index(control: Control, state: npt.NDArray[np.int64]) -> str:
    entries = control.array("index")
    places = np.flatnonzero(entries)
    named = (entries[places] & np.uint64(PARENT_MASK)).astype(np.int64) - 1
    if named.size and (int(named.max()) >= len(state) or int(named.min()) < 0):
        return f"an index entry points beyond the blocks, to {int(named.max())}"
    stray = named[~np.isin(state[named], _ENTERED)]
    if stray.size:
        return f"the index points to block {stray[0]}, which is {words.describe(control.state[stray[0]])}"
    indexed = np.flatnonzero((state == INDEXED) | (state == EVICTING))
    once = np.sort(named[np.isin(named, indexed)])
    if not np.array_equal(once, indexed):
        odd = np.setxor1d(once, indexed)
        return f"block {odd[0] if odd.size else once[0]} is INDEXED and in the index a different number of times"
    keys = control.array("key")[named]
    mask = len(entries) - 1
    distance = places - (keys[:, 0] & np.uint64(mask)).astype(np.int64) & mask
    tags = keys[:, 1] & np.uint64(0xFFFFFFFF)
    lost = (distance >= layout.WINDOW) | (entries[places] >> np.uint64(32) != tags)
    if lost.any():
        return f"block {named[np.flatnonzero(lost)[0]]} is INDEXED but a look-up of its key does not reach it"
    indexed_keys: Any = control.array("key")[indexed]
    if len(np.unique(indexed_keys, axis=0)) != len(indexed):
        return "two INDEXED blocks have one key"
    return ""


def _check_parents(control: Control, state: npt.NDArray[np.int64]) -> str:
    indexed = (state == INDEXED) | (state == EVICTING)
    rows = np.flatnonzero(indexed)
    word = control.array("parent")[rows]
    parent = (word & np.uint64(PARENT_MASK)).astype(np.int64) - 1
    depth = (word >> np.uint64(DEPTH_SHIFT)).astype(np.int64)
    if (parent >= len(state)).any() or ((parent < 0) != (depth == 0)).any():
        return "an INDEXED block has a damaged parent word"
    below = parent >= 0
    orphan = rows[below][~indexed[parent[below]]]
    if orphan.size:
        return f"block {orphan[0]} is INDEXED but its parent is not: the index is not prefix-closed"
    above = (control.array("parent")[parent[below]] >> np.uint64(DEPTH_SHIFT)).astype(np.int64)
    if (above + 1 != depth[below]).any():
        return "an INDEXED block is not one deeper than its parent"
    has = np.bincount(parent[below], minlength=len(state))
    counts = (control.array("children") & np.uint64(PARENT_MASK)).astype(np.int64)
    short = np.flatnonzero(indexed & (counts < has))
    if short.size:
        return f"block {short[0]} counts {counts[short[0]]} children, it has {has[short[0]]}"
    return ""


def _check_holders(
    control: Control, context: Context, slot: int, state: npt.NDArray[np.int64], tables: Collection[BlockTable]
) -> str:
    true_refs = Counter(block for table in tables for block in table.held())
    refs = context.refs
    for block in np.flatnonzero(refs).tolist():
        if refs[block] != true_refs[block]:
            return f"block {block} has {refs[block]} holders by its count, {true_refs[block]} by the open tables"
    if len(true_refs) != np.count_nonzero(refs) or context.held != len(true_refs):
        return f"{len(true_refs)} blocks are in open tables, {np.count_nonzero(refs)} counted, {context.held} in sum"
    bit = (control.array("holders") >> np.uint64(slot) & np.uint64(1)).astype(bool)
    wrong = np.flatnonzero(bit != ((refs > 0) & ((state == INDEXED) | (state == EVICTING))))
    if wrong.size:
        return f"block {wrong[0]} has {refs[wrong[0]]} holders here, its bit of slot {slot} says otherwise"
    owner = (control.array("state") >> np.uint64(words.OWNER_SHIFT) & np.uint64(0xFF)).astype(np.int64) - 1
    unheld = np.flatnonzero((owner == slot) & np.isin(state, (MUTABLE, SEALED)) & (refs == 0))
    if unheld.size:
        what = words.describe(control.state[unheld[0]])
        return f"block {unheld[0]} is {what} but no request holds it: it is lost"
    return ""


def _check_tables(control: Control, slot: int, tables: Collection[BlockTable]) -> str:
    seen: dict[int, str] = {}
    for table in tables:
        if table.closed:
            return f"the table of {table.request_id!r} is closed but still counted as open"
        held = table.held()
        if len(set(held)) != len(held):
            return f"a block is twice in the table of {table.request_id!r}"
        for block in held:
            word = control.state[block]
            shared = word & STATE_MASK in (INDEXED, EVICTING)
            if block in seen and not shared:
                what = words.describe(word)
                return f"block {block} is {what} but {seen[block]!r} and {table.request_id!r} both hold it"
            if not shared and (word & STATE_MASK not in (MUTABLE, SEALED) or words.owner_of(word) != slot):
                return f"block {block} is in the table of {table.request_id!r} but is {words.describe(word)}"
            seen[block] = table.request_id
        blocks = table.blocks
        for position, key in enumerate(table.keys):
            if control.key(blocks[position]) != key:
                return f"position {position} of {table.request_id!r} has another key than its block"
    return ""


def _check_local(control: Control, slot: int, state: npt.NDArray[np.int64]) -> str:
    first = slot * layout.SLOT_WORD_COUNT + layout.SLOT_WORDS["local_cache"]
    listed = sorted(word - 1 for word in control.slots[first : first + layout.LOCAL_CACHE_BLOCKS] if word)
    owner = (control.array("state") >> np.uint64(words.OWNER_SHIFT) & np.uint64(0xFF)).astype(np.int64) - 1
    ours = np.flatnonzero((owner == slot) & (state == LOCAL)).tolist()
    if listed != ours:
        return f"the local cache of slot {slot} lists {listed}, the blocks say {ours}"
    return ""
