"""How much of the processors' time others took while something was measured: other processes, and the host of a virtual machine.

All time that the kernel counts as busy or stolen, less what this process and those below it used, as a share of what all
processors could give. Engines whose threads wait for each other lose far more than that share, so a measurement of which others
had more than `QUIET` is left out where there is one without.

Limits: Linux, which counts in hundredths of a second: measure for half a second at least. Work of the kernel that nobody is
charged for counts as others'.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from cluster.bench.http_cpu import look

QUIET: Final = 0.1
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)  # idle, and waiting for a disk
_COUNTED: Final = 8  # what follows is counted in these already


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds of all processors since the machine started: busy ones, all, and those of ours."""

    busy_s: float
    all_s: float
    own_s: float

    def others_since(self, before: Moment) -> float:
        """The share of others between two moments; 0 where there is nothing between them."""
        span = self.all_s - before.all_s
        taken = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return min(1.0, max(0.0, taken / span)) if span > 0 else 0.0


def now(stat: Path = _STAT, own_s: Callable[[], float] | None = None) -> Moment:
    """This moment. `own_s` gives our own seconds."""
    ticks = os.sysconf("SC_CLK_TCK")
    counted = [
        int(field) / ticks for field in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:][:_COUNTED]
    ]
    idle = sum(counted[index] for index in _IDLE)
    return Moment(sum(counted) - idle, sum(counted), (own_s or _own_s)())


def _own_s() -> float:
    return time.process_time() + sum(look(os.getpid()).seconds.values())


class Disturbed(Protocol):
    """A measurement that knows how much others took meanwhile."""

    @property
    def others(self) -> float:
        """Their share."""
        ...


Measurement = TypeVar("Measurement", bound=Disturbed)


def undisturbed(found: Sequence[Measurement]) -> list[Measurement]:
    """Those of `found` that are quiet; all where none is."""
    return [one for one in found if one.others <= QUIET] or list(found)
