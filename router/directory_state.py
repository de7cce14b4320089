"""How far this process's picture of the directory can be trusted.

off     no directory is configured
live    the mirror is at the end of the log
stale   the directory does not answer, or the mirror is behind, but not for long: its picture is still used
silent  behind for longer than `fresh_s`, or never caught up: nothing is decided by it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Literal, get_args

from router.mirror import Mirror, PoolView

DirectoryState = Literal["off", "live", "stale", "silent"]
STATES: Final[tuple[DirectoryState, ...]] = get_args(DirectoryState)

_BEHIND_S: Final = 0.5
"""A follower is at the end of the log several times a second, also when nothing is written."""


class DirectoryWatch:
    """Watches `mirror` (None: no directory) and its follower: whether it is `connected`, and if not, with what `problem`.

    Times are those of the mirror's clock.
    """

    def __init__(
        self,
        mirror: Mirror | None,
        connected: Callable[[], bool],
        fresh_s: float,
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        self._mirror = mirror
        self._problem = problem
        self._connected = connected
        self._fresh_s = fresh_s

    def silence(self, now: float) -> str:
        """Why the mirror cannot be used now; empty when it can."""
        if self._mirror is None:
            return "no directory"
        lag_s = self._mirror.lag_s(now)
        if lag_s <= self._fresh_s:
            return ""
        return f"directory silent for {lag_s:.1f} s" if math.isfinite(lag_s) else "the directory has not answered yet"

    def state(self, now: float) -> DirectoryState:
        """The state now."""
        if self._mirror is None:
            return "off"
        if self.silence(now) or not self._mirror.pools(now):
            return "silent"
        return "live" if self._connected() and self._mirror.lag_s(now) <= _BEHIND_S else "stale"

    def counts(self) -> tuple[int, int, int]:
        """Resyncs, gaps and digest mismatches so far."""
        if self._mirror is None:
            return 0, 0, 0
        counts = self._mirror.counts
        return counts["resyncs"], counts["gaps"], counts["digest_mismatches"]

    def report(self, now: float) -> dict[str, Any]:
        """Everything, ready for JSON. `lag_s` is null until the mirror has caught up once."""
        lag_s = self._mirror.lag_s(now) if self._mirror is not None else math.inf
        resyncs, gaps, mismatches = self.counts()
        return {
            "state": self.state(now),
            "lag_s": lag_s if math.isfinite(lag_s) else None,
            "lag_entries": self._mirror.lag_entries() if self._mirror is not None else 0,
            "resyncs": resyncs,
            "gaps": gaps,
            "digest_mismatches": mismatches,
            "problem": self._problem(),
            "pools": [_told(view) for view in self._mirror.pools(now)] if self._mirror is not None else [],
        }


def _told(view: PoolView) -> dict[str, Any]:
    return {
        "pool": view.pool,
        "state": view.state,
        "whole": view.whole,
        "key_blocks": view.key_blocks,
        "seq": view.seq,
        "age_s": view.age_s,
        "free_blocks": view.free_blocks,
        "replica_ids": list(view.replica_ids),
        "replicas": [asdict(one) for one in view.replicas],
    }
