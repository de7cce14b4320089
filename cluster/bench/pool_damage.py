"""What deaths and accidents leave behind in a region, made on purpose: the words that the tidy pass has to put right.

Each function writes what one kind of accident writes, into a region in which nothing else is going on:

    dead_slot      a process is gone and took its blocks with it
    lose_bits      blocks are free, and no bit of the free bitmap says so (a death between the state word and the bit)
    raise_counts   blocks count a child that they do not have (a death between the count and the child's publication)
    crowd_index    no key can enter the index: what is sealed meanwhile stays without an entry (contention)

Limits: for benchmarks and tests. The region must be attached and at rest; blocks are named by number and must be in the
state that is asked for (AssertionError).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from kvpool import layout, words
from kvpool.control import Control
from kvpool.process import start_ticks

# An entry that names block 0 with a tag that a key has once in four billion times.
_STRANGER = 0xFFFFFFFF << 32 | 1
_SLOT_WORDS = layout.SLOT_BYTES // 8


def free_blocks(control: Control) -> list[int]:
    """Returns the blocks that are FREE."""
    states = control.array("state") & np.uint64(words.STATE_MASK)
    return [int(block) for block in np.flatnonzero(states == words.FREE)]


def dead_slot(control: Control, slot: int, blocks: Sequence[int]) -> None:
    """Process slot `slot` becomes that of a dead process, which was filling the FREE `blocks`."""
    first = slot * _SLOT_WORDS
    signature = {
        "pid": os.getpid(),
        "start_time": start_ticks(os.getpid()),
        "generation": 1,
        "used_blocks": len(blocks),
    }
    for name, value in signature.items():
        control.slots[first + layout.SLOT_WORDS[name]] = value
    control.header[layout.HEADER_WORDS["slots_used"]] |= 1 << slot
    for block in blocks:
        _clear_free_bit(control, block)
        control.state[block] = words.moved(control.state[block], words.MUTABLE, slot)


def lose_bits(control: Control, blocks: Sequence[int]) -> None:
    """The free bits of the FREE `blocks` are cleared."""
    for block in blocks:
        assert words.state_of(control.state[block]) == words.FREE, f"block {block} is not free"
        _clear_free_bit(control, block)


def _clear_free_bit(control: Control, block: int) -> None:
    control.free[block >> 6] &= ~(1 << (block & 63))


def raise_counts(control: Control, blocks: Sequence[int]) -> None:
    """Each of the INDEXED `blocks` counts one child too many, and the region knows that such counts may exist."""
    for block in blocks:
        assert words.state_of(control.state[block]) == words.INDEXED, f"block {block} is not indexed"
        control.children[block] += 1
    control.header[layout.HEADER_WORDS["recount"]] = 1


@contextlib.contextmanager
def crowd_index(control: Control) -> Iterator[None]:
    """While the body runs, every empty entry of the index is taken by one that no key leads to."""
    entries = control.array("index")
    empty = np.flatnonzero(entries == layout.INDEX_EMPTY)
    entries[empty] = np.uint64(_STRANGER)
    try:
        yield
    finally:
        entries[empty] = layout.INDEX_EMPTY
