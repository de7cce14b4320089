"""A mirror with its follower, in the test's own time and without a thread."""

from __future__ import annotations

from kvpool.directory import DirectoryReader
from router.follower import Follower
from router.mirror import Mirror, MirrorLimits, PoolView
from router.mirror_check import check


class Listener:
    """Follows `reader`; `now` moves only when the test moves it."""

    def __init__(self, reader: DirectoryReader, limits: MirrorLimits | None = None) -> None:
        self.now = 100.0
        self.mirror = Mirror(limits)
        self.follower = Follower(reader, self.mirror, lambda: self.now)

    def follow(self, steps: int = 3) -> Listener:
        """Reads what there is, and repairs what that showed."""
        for _ in range(steps):
            self.follower.step(0.001)
        return self

    def catch_up(self) -> Listener:
        """Follows until nothing is left to read or repair; pauses between tries go by."""
        quiet = 0
        for _ in range(60):
            before = (self.mirror.counts.copy(), self.follower.counts.copy())
            answered = self.follower.step(0.001)
            whole = all(view.whole for view in self.mirror.pools(self.now))
            same = before == (self.mirror.counts, self.follower.counts)
            quiet = quiet + 1 if answered and whole and same and self.mirror.lag_entries() == 0 else 0
            if quiet == 2:
                break
            self.now += 0.02
        return self

    def view(self, pool: str = "pool-0") -> PoolView | None:
        """The pool as the router sees it."""
        return next((view for view in self.mirror.pools(self.now) if view.pool == pool), None)

    def difference(self, keys: set[bytes], pool: str = "pool-0") -> str:
        """'' when the mirror knows exactly these keys, else what is wrong."""
        found = check(self.mirror, pool, keys)
        return found.describe() if found else ""
