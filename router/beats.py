"""Whose heartbeats came lately: a counter, and the names of the pools of the last KEPT.

One thread notes, any number ask. A name is written before the counter is raised, so whoever has read the counter
finds the names up to there; whoever was overtaken by a whole round is told so.
"""

from __future__ import annotations

from typing import Final

KEPT: Final = 4096


class Beats:
    """See above. `count`: heartbeats noted so far."""

    __slots__ = ("_names", "count")

    def __init__(self) -> None:
        self.count = 0
        self._names = [""] * KEPT

    def note(self, pool: str) -> None:
        """A heartbeat of `pool` has come, and what it brought can be read."""
        self._names[self.count % KEPT] = pool
        self.count += 1

    def since(self, mark: int) -> tuple[str, ...] | None:
        """Returns the pools of all heartbeats after the first `mark`, in order; None when those are not all known any more."""
        count = self.count
        names = tuple(self._names[number % KEPT] for number in range(max(mark, count - KEPT), count))
        # The writer is at most at number `self.count`, whose name it may have written already.
        return names if self.count - mark < KEPT else None
