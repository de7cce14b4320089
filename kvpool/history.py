"""The last four things that happened to a block, as guard mode notes them: what, in which process, when.

An event is one 64-bit word: what (4 bits), slot + 1 (7), the low 8 bits of the slot's generation, and monotonic time in
steps of 10 microseconds (45). The slot's generation tells whether the process that has the slot now is the one that
did it.

Limits: written by whoever has the block in its hands, so never by two at a time; 256 lives of a slot later another process
passes for the one that did it; times wrap after eleven years of uptime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpool import slot as process_slot
from kvpool.control import Control
from kvpool.layout import SLOTS

EVENTS: Final = {1: "taken", 2: "sealed", 3: "given back", 4: "reclaimed"}
TAKEN, SEALED, GIVEN_BACK, RECLAIMED = EVENTS
KEPT: Final = 4
"""Events kept of each block."""

_TICK_NS: Final = 10_000
_TIME_MASK: Final = (1 << 45) - 1


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a block. `pid` is 0, and `replica_id` empty, when the process has left since."""

    what: str
    slot: int
    pid: int
    replica_id: str
    at_s: float

    def describe(self) -> str:
        """Returns it in words; the time is that of the monotonic clock."""
        return f"{self.what} by {self.who()} at {self.at_s:.5f} s"

    def who(self) -> str:
        """Returns who did it, in words."""
        return _name(self.slot, self.pid, self.replica_id)


def note(control: Control, block: int, event: int, slot: int, now_ns: int) -> None:
    """Adds an event to the history of `block`, which is in the hands of the process in `slot`."""
    words, first = control.history, KEPT * block
    words[first + 1 : first + KEPT] = words[first : first + KEPT - 1]
    life = process_slot.word(control, slot, "generation") & 0xFF
    words[first] = event << 60 | slot + 1 << 53 | life << 45 | now_ns // _TICK_NS & _TIME_MASK


def events(control: Control, block: int) -> list[Event]:
    """Returns the last events of `block`, newest first; none where guard mode is off."""
    found = []
    for word in control.history[KEPT * block : KEPT * (block + 1)]:
        if word >> 60 in EVENTS:
            slot = (word >> 53 & 0x7F) - 1
            pid, replica_id = process_in(control, slot)
            if pid and process_slot.word(control, slot, "generation") & 0xFF != word >> 45 & 0xFF:
                pid, replica_id = 0, ""
            at_s = (word & _TIME_MASK) * _TICK_NS / 1e9
            found.append(Event(EVENTS[word >> 60], slot, pid, replica_id, at_s))
    return found


def process_in(control: Control, slot: int) -> tuple[int, str]:
    """Returns process id and replica id of whoever has `slot` now; 0 and '' when nobody has."""
    if not 0 <= slot < SLOTS or not (pid := process_slot.word(control, slot, "pid")):
        return 0, ""
    return pid, process_slot.text(control, slot)


def describe_process(control: Control, slot: int) -> str:
    """Returns who has `slot` now, in words."""
    return _name(slot, *process_in(control, slot))


def _name(slot: int, pid: int, replica_id: str) -> str:
    if not pid:
        return f"slot {slot}, whose process has left"
    return f"process {pid}{f' ({replica_id})' if replica_id else ''} in slot {slot}"
