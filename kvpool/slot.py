"""Process slots: the right to change a region, and the signature under what is done.

A slot is taken by locking its bytes in the file (`ofd_lock.py`), so any death gives it back. Whoever gets the lock of a
slot that is signed has found a dead process: what it had must be reclaimed before the slot is used again. So a slot is
taken in this order: lock, reclaim if signed, sign. And given back: everything else first, then the signature goes,
then the lock.

A slot's counters are added to those of the retired when it is given back or reclaimed, so totals of a region never fall.

Limits: 64 processes at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool import layout
from kvpool.control import Control
from kvpool.errors import PoolError
from kvpool.layout import COUNTERS, HISTOGRAM_BUCKETS, HISTOGRAMS, SLOT_WORD_COUNT, SLOT_WORDS
from kvpool.process import start_ticks

if TYPE_CHECKING:
    from kvpool.region import Region

_SUMS = [word for name, word in COUNTERS.items() if not name.startswith("peak_")] + [
    first + bucket for first in HISTOGRAMS.values() for bucket in range(HISTOGRAM_BUCKETS)
]
_PEAKS = [word for name, word in COUNTERS.items() if name.startswith("peak_")]


def take(region: Region, control: Control) -> int:
    """Locks a process slot of `region`, an unsigned one if there is one, and returns its number.

    Raises PoolError when 64 living processes have all of them.
    """
    unsigned_first = sorted(range(layout.SLOTS), key=lambda slot: word(control, slot, "pid") != 0)
    for slot in unsigned_first:
        if region.lock_slot(slot):
            return slot
    raise PoolError(f"{layout.SLOTS} processes use {region.path} already; give this one a region of its own")


def word(control: Control, slot: int, name: str) -> int:
    """Returns the field `name` of a slot."""
    value: int = control.slots[slot * SLOT_WORD_COUNT + SLOT_WORDS[name]]
    return value


def set_word(control: Control, slot: int, name: str, value: int) -> None:
    """Writes the field `name` of a slot."""
    control.slots[slot * SLOT_WORD_COUNT + SLOT_WORDS[name]] = value


def text(control: Control, slot: int) -> str:
    """Returns the replica id in a slot."""
    first = slot * SLOT_WORD_COUNT + SLOT_WORDS["replica_id"]
    data = control.slots[first : first + layout.REPLICA_ID_BYTES // 8].tobytes()
    return data.rstrip(b"\0").decode("utf-8", "replace")


def set_text(control: Control, slot: int, replica_id: str) -> None:
    """Writes the replica id in a slot, cut to 128 bytes."""
    first = slot * SLOT_WORD_COUNT + SLOT_WORDS["replica_id"]
    data = replica_id.encode()[: layout.REPLICA_ID_BYTES].ljust(layout.REPLICA_ID_BYTES, b"\0")
    control.slots[first : first + layout.REPLICA_ID_BYTES // 8] = memoryview(data).cast("Q")


def sign(control: Control, slot: int, now_ns: int, floor_blocks: int) -> None:
    """Writes who we are into our slot, whose other words are 0 but for the generation."""
    set_word(control, slot, "generation", word(control, slot, "generation") + 1)
    set_word(control, slot, "start_time", start_ticks(os.getpid()))
    set_word(control, slot, "heartbeat", now_ns)
    set_word(control, slot, "floor_blocks", floor_blocks)
    set_word(control, slot, "pid", os.getpid())


def retire(control: Control, slot: int) -> None:
    """Adds a slot's counters to those of the retired, and zeroes its words; the signature goes last."""
    slots, first, retired = control.slots, slot * SLOT_WORD_COUNT, layout.RETIRED * SLOT_WORD_COUNT
    for place in _SUMS:
        slots[retired + place] = slots[retired + place] + slots[first + place] & 0x7FFF_FFFF_FFFF_FFFF
    for place in _PEAKS:
        slots[retired + place] = max(slots[retired + place], slots[first + place])
    keep = (SLOT_WORDS["pid"], SLOT_WORDS["generation"])
    for place in range(SLOT_WORD_COUNT):
        if place not in keep:
            slots[first + place] = 0
    slots[first + SLOT_WORDS["pid"]] = 0


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """How busy the replica in a slot says it is."""

    replica_id: str
    queued_prefill_tokens: int
    running: int
    waiting: int
    prefill_tokens_per_s: float


def load_of(control: Control, slot: int) -> SlotLoad:
    """Returns what the replica in `slot` reported last."""
    return SlotLoad(
        text(control, slot),
        word(control, slot, "queued_prefill_tokens"),
        word(control, slot, "running"),
        word(control, slot, "waiting"),
        word(control, slot, "prefill_mtokens_per_s") / 1000,
    )


def set_load(control: Control, slot: int, load: SlotLoad) -> None:
    """Writes what the replica in `slot` reports."""
    set_text(control, slot, load.replica_id)
    set_word(control, slot, "queued_prefill_tokens", load.queued_prefill_tokens)
    set_word(control, slot, "running", load.running)
    set_word(control, slot, "waiting", load.waiting)
    set_word(control, slot, "prefill_mtokens_per_s", int(load.prefill_tokens_per_s * 1000))
