"""Bringing a region whose last user died back to rest.

Called by the process that has just found all slots of the region dead, before it mutates anything. What is complete
and matchable stays, everything half done is undone:

    INDEXED            stays
    EVICTING           was not past the point of no return: INDEXED again
    LOCAL, MUTABLE, SEALED, FREEING, damaged    FREE, with a new generation

Nobody holds anything any more. A block whose chain of parents is broken goes as well, so the index stays
prefix-closed. Child counts, free bitmap and index are then computed anew from the states: they are consequences, and
whatever a death left in them is forgotten. Sealing publishes a block only after its bytes were written, so what stays
is right.

Limits: nobody else may have a slot; idempotent, so a death in the middle costs another run.
"""

from __future__ import annotations

import numpy as np

from kvpool.control import Control
from kvpool.index import PrefixIndex
from kvpool.words import EVICTING, FREE, GENERATION_MASK, GENERATION_SHIFT, INDEXED, STATE_MASK


def recover(control: Control) -> int:
    """Puts every block into FREE or INDEXED without holders, and the rest of the control part in step with that.

    Returns the number of blocks whose state had to change. Mutates everything but counters and the header's constants.
    """
    state = control.array("state")
    before = state & np.uint64(STATE_MASK)
    generation = state >> np.uint64(GENERATION_SHIFT) & np.uint64(GENERATION_MASK)
    keep = _prefix_closed(control, (before == INDEXED) | (before == EVICTING))
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
    PrefixIndex(control).rebuild()
    return changed


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
