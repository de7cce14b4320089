"""What was given back after a death, and what a tidy pass did: records for logs, metrics and tests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvpool.control import Control
from kvpool.words import EVICTING, LOCAL, OWNER_SHIFT, STATE_MASK

NO_REQUEST = "(no request)"


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """One dead process. `blocks`: those that were in its name, by the end of the id of the request that wrote them."""

    slot: int
    pid: int
    replica_id: str
    blocks: dict[str, tuple[int, ...]]
    cause: Literal["dead"]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return sum(len(blocks) for blocks in self.blocks.values())

    def describe(self, most: int) -> str:
        """Returns the alarm in one line, naming up to `most` blocks of each request."""
        who = f"process {self.pid}{f' ({self.replica_id})' if self.replica_id else ''} in slot {self.slot} is dead"
        parts = [
            f"{request} {list(blocks[:most])}{' ...' if len(blocks) > most else ''}"
            for request, blocks in self.blocks.items()
        ]
        return f"{who}: reclaimed {self.count} blocks{': ' if parts else ''}{'; '.join(parts)}"


@dataclass(frozen=True, slots=True)
class TidyReport:
    """What one pass did: dead processes, free bits restored, child counts corrected, blocks indexed late."""

    reclaimed: tuple[Reclaimed, ...]
    restored_bits: int
    recounted: int
    late_indexed: int


def blocks_of(control: Control, slot: int) -> dict[str, tuple[int, ...]]:
    """Returns the blocks in the name of `slot`, by label; those in its local cache under NO_REQUEST."""
    words = control.array("state")
    named = np.flatnonzero((words >> np.uint64(OWNER_SHIFT) & np.uint64(0xFF)) == slot + 1)
    found: dict[str, list[int]] = defaultdict(list)
    for block in named.tolist():
        state = control.state[block] & STATE_MASK
        if state != EVICTING:
            found[NO_REQUEST if state == LOCAL else control.label(block) or NO_REQUEST].append(block)
    return {request: tuple(blocks) for request, blocks in found.items()}
