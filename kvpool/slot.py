"""Taking a process slot of a region: the right to mutate it, and the signature under what is done.

A slot is taken by locking its bytes in the file (`ofd_lock.py`), so it is given back by any death. While mutations are
not atomic across processes, a taker looks whether any other slot is locked too, and if so steps back: of two that come
at the same moment both may step back, but never both stay. Whoever stays is alone, so every other signature in the
region is of the dead.

Limits: 64 slots, one in use at a time.
"""

from __future__ import annotations

import os

from kvpool import layout
from kvpool.control import Control
from kvpool.errors import PoolError
from kvpool.process import start_ticks
from kvpool.region import Region

_WORDS_PER_SLOT = layout.SLOT_BYTES // 8


def take(region: Region) -> int:
    """Locks a free process slot of `region` and returns its number. Raises PoolError when another slot is in use."""
    slot = next((slot for slot in range(layout.SLOTS) if region.lock_slot(slot)), None)
    if slot is None or any(region.slot_in_use(other) for other in range(layout.SLOTS) if other != slot):
        if slot is not None:
            region.unlock_slot(slot)
        raise PoolError(f"another living pool uses {region.path}; give this one a region of its own")
    return slot


def sign(control: Control, slot: int, now_ns: int) -> None:
    """Zeroes the words of every slot (all others are dead) and writes who we are into ours; counters start at 0."""
    slots, first = control.slots, slot * _WORDS_PER_SLOT
    lives = slots[first + layout.SLOT_WORDS["generation"]]
    control.array("slots")[:] = 0
    signature = {
        "pid": os.getpid(),
        "start_time": start_ticks(os.getpid()),
        "generation": lives + 1,
        "heartbeat": now_ns,
    }
    for name, value in signature.items():
        slots[first + layout.SLOT_WORDS[name]] = value
