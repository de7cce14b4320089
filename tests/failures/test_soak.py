"""All faults, one to three at a time, in random order for minutes; after each lot everything must be equal, key by key."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.failures.log_damage import DAMAGES, damage_before
from tests.failures.tap import FAULTS, Tap

if TYPE_CHECKING:
    from tests.failures.rig import Field, PoolHand

pytestmark = [pytest.mark.redis, pytest.mark.soak, pytest.mark.timeout(1200)]

SOAK_S: Final = 180.0
SHARED: Final = "shared"
Cure = tuple[int, Callable[[], object]]
"""What ends a fault: Redis first (0), then those that stand still (1), then those that are started again (2)."""


class Storm:
    """The faults: each does its harm and returns what ends it. Names are those that the report counts."""

    def __init__(self, field: Field, tap: Tap) -> None:
        self.field, self.tap, self.rng = field, tap, field.rng
        self.renamed = 0
        field.pool("pool-0")
        field.pool("pool-1", url=tap.url)
        first = field.pool(SHARED, replica_ids=["r0", "r1"])
        field.pool(SHARED, how="attach", path=first.path, replica_ids=["r0", "r1"])
        for _ in range(2):
            field.router()

    def any_pool(self) -> PoolHand:
        return self.rng.choice([hand for hand in self.field.pools if not hand.process.stopped])

    def killed(self) -> Cure:
        """A pool's process dies and is started again: in its region, in a new one, or beside the one that shares it."""
        hand, field = self.any_pool(), self.field
        field.kill(hand)
        shared = any(other.pool == hand.pool for other in field.pools)
        how = "attach" if shared else "adopt" if hand.pool == SHARED else self.rng.choice(("adopt", "create"))
        path = None if how == "create" else hand.path
        return 2, lambda: field.pool(hand.pool, how=how, path=path, replica_ids=hand.replica_ids)

    def replaced(self) -> Cure:
        """A pool leaves properly, and one with another name comes."""
        hands = [hand for hand in self.field.pools if hand.pool != SHARED and not hand.process.stopped]
        if len(hands) < 2:
            return 2, lambda: None
        self.field.leave(self.rng.choice(hands))
        self.renamed += 1
        name = f"renamed-{self.renamed}"
        return 2, lambda: self.field.pool(name, url=self.rng.choice((self.tap.url, "")))

    def stopped(self) -> Cure:
        """A pool's process stands still, shorter or longer than its lease."""
        hand = self.any_pool()
        hand.process.stop()
        return 1, hand.process.go_on

    def router_killed(self) -> Cure:
        routers = [router for router in self.field.routers if not router.stopped]
        if len(routers) < 2:
            return 2, lambda: None
        self.field.kill_router(self.rng.choice(routers))
        return 2, self.field.router

    def router_stopped(self) -> Cure:
        routers = [router for router in self.field.routers if not router.stopped]
        if len(routers) < 2:
            return 1, lambda: None
        router = self.rng.choice(routers)
        router.stop()
        return 1, router.go_on

    def tapped(self) -> Cure:
        """A batch is lost, repeated or late on its way."""
        self.tap.make(self.rng.choice(FAULTS))
        return 0, lambda: None

    def redis_hung(self) -> Cure:
        self.field.redis.pause()
        return 0, self.field.redis.resume

    def redis_emptied(self) -> Cure:
        self.field.redis.forget()
        self.field.redis.stop()
        return 0, self.field.redis.start

    def redis_set_back(self) -> Cure:
        """It comes back with what it knew a while ago."""
        self.field.redis.save()
        self.field.run(self.rng.uniform(0.1, 1.0))
        self.field.redis.stop()
        return 0, self.field.redis.start

    def log_damaged(self) -> Cure:
        """By hand, past every fence."""
        pools = [hand.pool for hand in self.field.pools if hand.publishes]
        damage_before(self.field, self.field.routers[0], self.rng.choice(pools), self.rng.choice(DAMAGES))
        return 0, lambda: None


@pytest.mark.parametrize("seconds", [SOAK_S])
def test_a_storm_of_faults_leaves_nothing_behind(field: Field, tmp_path: Path, seconds: float) -> None:
    tap = Tap(Path(field.redis.url.removeprefix("unix://")), tmp_path / "tap.sock")
    storm = Storm(field, tap)
    alone = [storm.log_damaged]
    redis_faults = [storm.redis_hung, storm.redis_emptied, storm.redis_set_back]
    others = [storm.killed, storm.replaced, storm.stopped, storm.router_killed, storm.router_stopped, storm.tapped]
    counts: Counter[str] = Counter()
    recoveries: list[tuple[float, str]] = []
    try:
        field.recovered()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            field.run(field.rng.uniform(0.1, 0.6))
            # Redis fails last: the others need it for what they do.
            lot = field.rng.sample(others, field.rng.randint(0, 2)) + field.rng.sample(
                redis_faults, field.rng.randint(0, 1)
            )
            lot = lot or alone
            cures = []
            for fault in lot:
                cures.append(fault())
                counts[fault.__name__] += 1
                field.run(field.rng.uniform(0.0, 0.2))
            field.run(field.rng.choice((0.0, 0.3, 1.0, field.lease_s + 0.5)))
            for _, cure in sorted(cures, key=lambda one: one[0]):
                cure()
            recoveries.append((field.recovered(), "+".join(fault.__name__ for fault in lot)))
            field.settle()
        recoveries.sort()
        field.note("recovery_p50_s", statistics.median(took for took, _ in recoveries))
        field.note("recovery_worst_s", recoveries[-1][0])
        print(f"{sum(counts.values())} faults in {len(recoveries)} lots: {dict(counts)}")
        print("slowest:", ", ".join(f"{lot} {took:.1f} s" for took, lot in recoveries[-5:]))
        field.finish("a storm of faults")
    finally:
        tap.close()
