"""A region that several processes share, in plain Python: the oracle that the real pool is compared with.

twin = Twin(capacity=8, block_tokens=2, clock=clock)
one, other = twin.attach(0), twin.attach(1)
twin.kill(1)              # the process vanishes: its requests are gone, its words stay
one.reclaim()             # or twin.attach(1): whoever attaches reclaims first
"""

from __future__ import annotations

from collections.abc import Callable

from tests.kvpool.twin import integrity, recovery
from tests.kvpool.twin.memory import Memory
from tests.kvpool.twin.pool import TwinPool
from tests.kvpool.twin.recovery import Reclaimed


class Twin:
    """One region and the processes that are attached to it. `alive`: their pools by slot."""

    def __init__(
        self, capacity: int, block_tokens: int, clock: Callable[[], int] = lambda: 0, *, exact_order: bool = True
    ) -> None:
        """`clock` gives nanoseconds. Without `exact_order` evictions may be told to take any leaf."""
        self.memory = Memory(capacity, block_tokens, exact_order=exact_order)
        self.alive: dict[int, TwinPool] = {}
        self._clock = clock

    def attach(self, slot: int) -> TwinPool:
        """A process takes `slot`, which no living one has, after it has reclaimed every dead one."""
        assert slot not in self.alive, f"slot {slot} is taken"
        recovery.reclaim(self.memory, self.memory.died)
        self.memory.local[slot] = []
        pool = TwinPool(self.memory, slot, self._clock, self._leave, self.check)
        self.alive[slot] = pool
        return pool

    def _leave(self, pool: TwinPool) -> None:
        del self.alive[pool.slot]
        assert self.memory.local.pop(pool.slot) == []

    def kill(self, slot: int) -> None:
        """The process of `slot` is gone without a word."""
        self.alive.pop(slot).closed = True
        self.memory.died.add(slot)

    def reclaim(self, slot: int) -> Reclaimed:
        """Gives back what the dead process of `slot` left. A second time finds nothing."""
        assert slot not in self.alive, f"the process of slot {slot} is alive"
        return recovery.reclaim(self.memory, (slot,))[0]

    def check(self) -> str:
        """'' or the first violation, seen from all processes."""
        return integrity.check(self.memory, [(pool.hands, pool.tables) for pool in self.alive.values()])
