"""What was given back after a death, and what a tidy pass did: records for logs, metrics and tests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

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
    states = words[named] & np.uint64(STATE_MASK)
    local, others = named[states == LOCAL], named[(states != LOCAL) & (states != EVICTING)]
    found: dict[str, list[int]] = defaultdict(list)
    for run in _runs_of_one_label(control, others):
        found[control.label(run[0]) or NO_REQUEST].extend(run)
    if len(local):
        found[NO_REQUEST].extend(local.tolist())
    return {request: tuple(blocks) for request, blocks in found.items()}


def _runs_of_one_label(control: Control, blocks: npt.NDArray[np.int64]) -> list[list[int]]:
    """`blocks` cut where the label changes: a request's blocks mostly lie side by side, and there may be thousands."""
    labels = control.array("label")[blocks]
    cuts = np.flatnonzero((labels[1:] != labels[:-1]).any(axis=1)) + 1
    return [run.tolist() for run in np.split(blocks, cuts) if len(run)]
