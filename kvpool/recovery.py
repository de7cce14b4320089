"""Bringing a region that nobody uses back to rest, whatever its last users left in it.

Called by a process that has the whole file to itself (`Region.adopt`). What is complete and matchable stays, everything
half done is undone:

    INDEXED            stays
    EVICTING           was not past the point of no return: INDEXED again
    LOCAL, MUTABLE, SEALED, FREEING, damaged    FREE, with a new generation

Nobody holds anything any more. A block whose chain of parents is broken, or whose key another block has, goes as well. Child
counts, free bitmap, index, slots and header words are then made anew from the states: they are consequences, and whatever
is in them is forgotten. Sealing publishes a block only after its bytes were written, so what stays is right. Unlike
reclaiming a slot it trusts no word but a state word.

Limits: nobody else may have the region open; idempotent, so a death in the middle costs another run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.control import Control
from kvpool.layout import HEADER_WORDS, SLOT_WORD_COUNT, SLOT_WORDS, SLOTS, WINDOW
from kvpool.words import EVICTING, FREE, GENERATION_MASK, GENERATION_SHIFT, INDEXED, STATE_MASK


def recover(control: Control) -> int:
    """Puts every block into FREE or INDEXED without holders, and the rest of the control part in step with that.

    Returns the number of blocks whose state had to change. Mutates everything but counters and the header's constants.
    """
    state = control.array("state")
    before = state & np.uint64(STATE_MASK)
    generation = state >> np.uint64(GENERATION_SHIFT) & np.uint64(GENERATION_MASK)
    keep = _prefix_closed(control, (before == INDEXED) | (before == EVICTING))
    index = _index_of(control, keep)
    free = before == FREE
    new_life = ~keep & ~free
    generation = generation + new_life & np.uint64(GENERATION_MASK)
    after = np.where(keep, np.uint64(INDEXED), np.uint64(FREE))
    changed = int(np.count_nonzero(after != before))
    state[:] = generation << np.uint64(GENERATION_SHIFT) | after

    control.array("holders")[:] = 0
    parents = (control.array("parent")[keep] & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1
    control.array("children")[:] = np.bincount(parents[parents >= 0], minlength=len(state)).astype(np.uint64)
    control.set_all_bits("free")
    bitmap = control.free
    for block in np.flatnonzero(keep).tolist():
        bitmap[block >> 6] &= ~(1 << (block & 63))
    control.set_all_bits("dirty")
    control.array("index")[:] = index
    for slot in range(SLOTS):
        control.slots[slot * SLOT_WORD_COUNT + SLOT_WORDS["pid"]] = 0
    for name in ("slots_used", "demand", "recount"):
        control.header[HEADER_WORDS[name]] = 0
    return changed


def _index_of(control: Control, keep: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    """Returns an index of the blocks in `keep`. Takes those out of `keep` that do not get a place: a key that is there
    already, a full window; and what is below them.
    """
    mask = control.layout.index_entries - 1
    entries = np.zeros(mask + 1, np.uint64)
    keys, parent = control.array("key"), control.array("parent")
    seen: set[bytes] = set()
    depth = parent >> np.uint64(32)
    for block in sorted(np.flatnonzero(keep).tolist(), key=lambda block: int(depth[block])):
        above = int(parent[block] & np.uint64(0xFFFFFFFF)) - 1
        key = control.key(block)
        home = int(keys[block, 0]) & mask
        places = (place for step in range(WINDOW) if not entries[place := home + step & mask])
        place = next(places, -1)
        if key in seen or place < 0 or (above >= 0 and not keep[above]):
            keep[block] = False
            continue
        seen.add(key)
        entries[place] = np.uint64((int(keys[block, 1]) & 0xFFFFFFFF) << 32 | block + 1)
    return entries


def _prefix_closed(
    control: Control, candidates: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Returns the candidates whose parents, up to the first block, are candidates too, one depth at a time."""
    parent = control.array("parent")
    above = (parent & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1
    depth = (parent >> np.uint64(32)).astype(np.int64)
    capacity = len(candidates)
    above[above >= capacity] = -1
    keep = np.zeros_like(candidates)
    rows = np.flatnonzero(candidates)
    for level in np.unique(depth[rows]).tolist():
        here = rows[depth[rows] == level]
        if level == 0:
            keep[here] = above[here] == -1
        else:
            keep[here] = (above[here] >= 0) & keep[above[here]] & (depth[above[here]] == level - 1)
    return keep
