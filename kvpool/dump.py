"""What is in a region, for a person who looks at it: a report of the whole, and a record of each block.

Both are made from a `RegionView`, so nobody is disturbed and no process is needed. Blocks are counted by condition as in
`stats.py`, each once.

Limits: others go on meanwhile. A block's record is read again when its state word changed under it, a few times; after
that it says so (`moving`). Ages are of this boot. What a dead process left half done is shown as it is; it is put right
when the region is reclaimed or adopted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool import guard, history, integrity, layout, stats, words
from kvpool import slot as process_slot
from kvpool.control import Control
from kvpool.geometry import BlockGeometry
from kvpool.process import start_ticks
from kvpool.region_view import RegionView
from kvpool.stats import PoolStats
from kvpool.words import FREE, LOCAL, MUTABLE, SEALED, STATE_MASK, STATE_NAMES

LOOKS: Final = 6
LOOK_PAUSE_S: Final = 0.1
"""In a living region a violation counts when it is still there after `LOOKS` looks: longer than a tidy pass takes to come."""

_ENTERED: Final = (words.SEALED, words.INDEXED, words.EVICTING, words.FREEING)
_PRIVATE: Final = 1 << 62  # parent word of a block that stays out of the index, see `kernels/sealing.py`
_RETRIES: Final = 4


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One process. `alive`: whether it has its lock; `running_s`: how long the process runs, None when it is gone.

    `heartbeat_s`: how long ago it showed that it is at work. The last four fields are what its replica reported.
    """

    slot: int
    pid: int
    alive: bool
    replica_id: str
    running_s: float | None
    heartbeat_s: float
    used_blocks: int
    floor_blocks: int
    ticket: int
    wanted_blocks: int
    queued_prefill_tokens: int
    running: int
    waiting: int
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One region. `unused_s`: seconds since its last use; `blocks`: by condition, summing to the capacity; `totals`: of all
    processes that use or used it. Fingerprint, owner and incarnation in hexadecimal.
    """

    path: str
    live: bool
    unused_s: float
    fingerprint: str
    owner: str
    incarnation: str
    geometry: BlockGeometry
    capacity_blocks: int
    file_bytes: int
    control_bytes: int
    slots: tuple[SlotReport, ...]
    blocks: Mapping[str, int]
    totals: PoolStats

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.totals.used_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.blocks["free"] + self.blocks["local"]


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block. `pid` and `replica_id`: of its owner, 0 and '' when nobody owns it.

    `holders`: slots that hold it in the index. `request`: end of the id of the request that wrote it last. Of a block that
    is not complete, `key` is '', `parent` and `depth` None, and `born_s` None; ages in seconds ago. `mark`: what guard mode
    left in it, `history`: what it noted, newest first.
    """

    block: int
    state: str
    generation: int
    slot: int | None
    pid: int
    replica_id: str
    holders: tuple[int, ...]
    request: str
    key: str
    parent: int | None
    depth: int | None
    children: int
    filled_tokens: int
    last_use_s: float | None
    born_s: float | None
    mark: str
    history: tuple[str, ...]
    moving: bool = False


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Which blocks to report: those that everything given here fits. `slot`: owns or holds it; `request`: part of the id."""

    block: int | None = None
    request: str = ""
    slot: int | None = None
    state: str = ""

    def numbers(self, control: Control) -> list[int]:
        """Returns the numbers of the blocks that fit now. Raises ValueError for a block or state that cannot be."""
        state = control.array("state")
        fits = np.ones(len(state), np.bool_)
        if self.block is not None:
            if not 0 <= self.block < len(state):
                raise ValueError(f"there is no block {self.block}: the region has blocks 0 to {len(state) - 1}")
            fits &= np.arange(len(state)) == self.block
        if self.state:
            numbers = [number for number, name in STATE_NAMES.items() if name == self.state.upper()]
            if not numbers:
                raise ValueError(f"there is no state {self.state}: use one of {', '.join(STATE_NAMES.values())}")
            fits &= state & np.uint64(STATE_MASK) == numbers[0]
        if self.slot is not None:
            if not 0 <= self.slot < layout.SLOTS:
                raise ValueError(f"there is no slot {self.slot}: a region has slots 0 to {layout.SLOTS - 1}")
            owns = state >> np.uint64(words.OWNER_SHIFT) & np.uint64(0xFF) == self.slot + 1
            fits &= owns | (control.array("holders") >> np.uint64(self.slot) & np.uint64(1) == 1)
        found: list[int] = np.flatnonzero(fits).tolist()
        return [block for block in found if self.request in control.label(block)] if self.request else found


def describe_region(view: RegionView, now_ns: Callable[[], int] = time.monotonic_ns) -> RegionReport:
    """Returns what the region is and who is in it. `now_ns`: the clock of its processes."""
    control, header = view.control, view.header
    blocks = count_blocks(control)
    signed = [slot for slot in range(layout.SLOTS) if process_slot.word(control, slot, "pid")]
    return RegionReport(
        path=str(view.path),
        live=view.is_live(),
        unused_s=view.unused_s(),
        fingerprint=header.fingerprint.hex(),
        owner=header.owner.hex(),
        incarnation=f"{header.incarnation:016x}",
        geometry=header.geometry,
        capacity_blocks=header.capacity_blocks,
        file_bytes=view.layout.file_bytes,
        control_bytes=view.layout.control_bytes,
        slots=tuple(_slot(view, slot, now_ns()) for slot in signed),
        blocks=blocks,
        totals=stats.region_totals(control, blocks),
    )


def _slot(view: RegionView, slot: int, now_ns: int) -> SlotReport:
    def word(name: str) -> int:
        return process_slot.word(view.control, slot, name)

    load = process_slot.load_of(view.control, slot)
    pid, started = word("pid"), word("start_time")
    is_same = bool(started) and start_ticks(pid) == started
    return SlotReport(
        slot=slot,
        pid=pid,
        alive=view.slot_is_live(slot),
        replica_id=load.replica_id,
        running_s=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
        if is_same
        else None,
        heartbeat_s=_ago(word("heartbeat"), now_ns),
        used_blocks=word("used_blocks"),
        floor_blocks=word("floor_blocks"),
        ticket=word("ticket"),
        wanted_blocks=word("wanted_blocks"),
        queued_prefill_tokens=load.queued_prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
    )


def count_blocks(control: Control) -> dict[str, int]:
    """Returns the number of blocks by condition, as `kernels/census.py` counts them."""
    state = control.array("state") & np.uint64(STATE_MASK)
    counts = {
        name: int(np.count_nonzero(state == number))
        for name, number in (("free", FREE), ("local", LOCAL), ("mutable", MUTABLE), ("sealed", SEALED))
    }
    rest = ~np.isin(state, (FREE, LOCAL, MUTABLE, SEALED))
    held = int(np.count_nonzero(rest & (control.array("holders") != 0)))
    return counts | {"held": held, "cached": int(np.count_nonzero(rest)) - held}


def check_region(view: RegionView, sleep: Callable[[float], None] = time.sleep) -> str:
    """Returns '' or the first violation, in words. In a living region, one that stays."""
    found = ""
    for look in range(LOOKS):
        before, found = found, integrity.check_region(view.control)
        if not found or (look and found != before):
            return ""
        if not view.is_live():
            return integrity.check_region(view.control)
        if look + 1 < LOOKS:
            sleep(LOOK_PAUSE_S)
    return found


def dump_blocks(
    view: RegionView, which: BlockFilter, limit: int | None = None, now_ns: Callable[[], int] = time.monotonic_ns
) -> tuple[int, list[BlockReport]]:
    """Returns how many blocks `which` fits, and records of the first `limit` of them (None: of all), by number.

    Raises ValueError for a filter that nothing can fit.
    """
    numbers = which.numbers(view.control)
    return len(numbers), [_block(view.control, block, now_ns()) for block in numbers[:limit]]


def _block(control: Control, block: int, now_ns: int) -> BlockReport:
    for _ in range(_RETRIES):
        word = control.state[block]
        report = _read(control, block, word, now_ns, moving=False)
        if control.state[block] == word:
            return report
    return _read(control, block, control.state[block], now_ns, moving=True)


def _read(control: Control, block: int, word: int, now_ns: int, moving: bool) -> BlockReport:
    state, owner = word & STATE_MASK, words.owner_of(word)
    pid, replica_id = history.process_in(control, owner)
    complete = state in _ENTERED
    link = control.parent[block]
    parent = (link & words.PARENT_MASK) - 1
    holders = control.holders[block]
    return BlockReport(
        block=block,
        state=STATE_NAMES.get(state, f"state {state}?"),
        generation=words.generation_of(word),
        slot=None if owner == words.NO_SLOT else owner,
        pid=pid,
        replica_id=replica_id,
        holders=tuple(slot for slot in range(layout.SLOTS) if holders >> slot & 1),
        request=control.label(block),
        key=control.key(block).hex() if complete else "",
        parent=parent if complete and parent >= 0 and link != _PRIVATE else None,
        depth=link >> words.DEPTH_SHIFT if complete and link != _PRIVATE else None,
        children=control.children[block] & words.PARENT_MASK if complete else 0,
        filled_tokens=control.filled[block] if complete else 0,
        last_use_s=_ago(control.last_use[block], now_ns) if complete else None,
        born_s=_ago(control.born[block], now_ns) if complete else None,
        mark=_mark(control, block, word),
        history=tuple(_event(event, now_ns) for event in history.events(control, block)),
        moving=moving,
    )


def _ago(then_ns: int, now_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9


def _mark(control: Control, block: int, word: int) -> str:
    """What guard mode left in the block: 'none' where that says nothing of the bytes there now."""
    kind, life, checksum = guard.mark_of(control, block)
    complete = word & STATE_MASK in _ENTERED
    if kind == guard.NOTHING or life != (guard.life_of(word) - (0 if complete else 1)) & guard.LIFE_MASK:
        return "none"
    return "poison" if kind == guard.POISONED else f"checksum {checksum:08x}"


def _event(event: history.Event, now_ns: int) -> str:
    return f"{event.what} by {event.who()} {_ago(int(event.at_s * 1e9), now_ns):.3f} s ago"
