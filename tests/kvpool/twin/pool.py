"""One process's pool over a twin region: the public methods of `kvpool.Pool`, in plain Python.

Meant to be read beside the rules, not to be fast: every question is answered by looking through all blocks.

Limits: one thread; no floors and no waiting line (every process may take what is available); no histograms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool import PoolError
from tests.kvpool.twin import eviction, recovery, sharing
from tests.kvpool.twin.hands import Hands
from tests.kvpool.twin.memory import NO_PARENT, Memory
from tests.kvpool.twin.recovery import Reclaimed, TidyReport
from tests.kvpool.twin.table import TwinTable
from tests.kvpool.twin.words import State


@dataclass(frozen=True, slots=True)
class TwinStats:
    """`blocks` are those of the region, everything else is this process's."""

    blocks: Mapping[str, int]
    open_tables: int
    allocation_failures: Mapping[str, int]
    evictions: Mapping[str, int]
    evicted_while_held: int
    cow_copies: int
    dedups: int
    hash_collisions: int
    second_releases: int
    forced_releases: Mapping[str, int]


class TwinPool:
    """What one attached process does. Made by `Twin.attach`. `leave` and `integrity` belong to the twin."""

    def __init__(
        self,
        memory: Memory,
        slot: int,
        clock: Callable[[], int],
        leave: Callable[[TwinPool], None],
        integrity: Callable[[], str],
    ) -> None:
        self.slot = slot
        self.closed = False
        self.hands = Hands(memory, slot)
        self.tables: set[TwinTable] = set()
        self.capacity_blocks = memory.capacity
        self._memory = memory
        self._clock = clock
        self._leave = leave
        self._integrity = integrity
        self._forced: Counter[str] = Counter()

    def table(self, request_id: str) -> TwinTable:
        """A new empty table."""
        return TwinTable(request_id, self.release)

    def match(self, table: TwinTable, keys: Sequence[bytes], token_ids: Sequence[int] | None = None) -> int:
        """Holds the longest indexed chain for an empty table; returns its number of blocks."""
        self._check(table)
        if table.held():
            raise PoolError(f"{table.request_id!r} has blocks already; match comes first")
        table.numbers = sharing.hold_chain(self.hands, keys, token_ids, self._clock())
        table.keys = list(keys[: len(table.numbers)])
        self._note(table)
        return len(table.numbers)

    def peek(self, keys: Sequence[bytes]) -> int:
        """The length of the longest indexed chain."""
        self._check()
        return sharing.chain_length(self.hands, keys)

    def allocate(self, table: TwinTable, count: int) -> bool:
        """Appends `count` mutable blocks, or changes nothing."""
        self._check(table)
        taken = self._take(table, count)
        if taken is None:
            return False
        table.numbers += taken
        self._note(table)
        return True

    def _take(self, table: TwinTable, count: int) -> list[int] | None:
        short = count - self.hands.takeable()
        if short > eviction.idle_blocks(self._memory):
            self.hands.counters["failures_full"] += 1
            return None
        if short > 0:
            evicted = eviction.evict(self.hands, short)
            assert evicted == short, f"{short} idle blocks were promised, {evicted} could be evicted"
        return self.hands.take(count, table.request_id)

    def available(self) -> int:
        """Free + own local + evictable blocks."""
        self._check()
        return self.hands.takeable() + eviction.idle_blocks(self._memory)

    def unused(self) -> int:
        """Free + all local blocks."""
        self._check()
        return len(self._memory.numbers(State.FREE, State.LOCAL))

    def seal(self, table: TwinTable, position: int, key: bytes, token_ids: Sequence[int]) -> int:
        """Completes the first unsealed block; returns the block that stands there now."""
        self._check(table)
        if position != len(table.keys) or position >= len(table.numbers):
            raise PoolError(f"position {position} of {table.request_id!r} is not the next one")
        own = table.numbers[position]
        if not self.hands.owns(own):
            raise PoolError(f"block {own} of {table.request_id!r} is not its own to seal; copy it first")
        now = self._clock()
        self.index_late(table)
        parent = table.numbers[position - 1] if position else NO_PARENT
        table.numbers[position] = sharing.seal(self.hands, own, parent, key, tuple(token_ids), now)
        table.keys.append(key)
        if own in table.copy_sources:
            self.hands.drop((table.copy_sources.pop(own),), now)
        return table.numbers[position]

    def index_late(self, table: TwinTable) -> int:
        """Tries again with the sealed blocks of a table that are not indexed; how many it could."""
        sealed = table.numbers[: len(table.keys)]
        done = sharing.index_late(self.hands, sealed, self._clock())
        table.numbers[: len(sealed)] = sealed
        return done

    def copy_on_write(self, table: TwinTable, position: int) -> tuple[int, int] | None:
        """Puts a private copy in the place of a sealed block; the source stays held until `finish_copy`."""
        self._check(table)
        if not 0 <= position < len(table.numbers):
            raise PoolError(f"{table.request_id!r} has {len(table.numbers)} blocks, no position {position}")
        source = table.numbers[position]
        if self.hands.owns(source):
            return source, source
        if len(table.keys) > position + 1:
            raise PoolError(f"{table.request_id!r} has sealed blocks after position {position}; copy the last one")
        taken = self._take(table, 1)
        if taken is None:
            return None
        table.numbers[position] = taken[0]
        table.copy_sources[taken[0]] = source
        del table.keys[position:]
        self.hands.counters["cow_copies"] += 1
        return source, taken[0]

    def finish_copy(self, table: TwinTable) -> None:
        """Lets go of the sources of all copies."""
        self._check(table)
        self.hands.drop(table.copy_sources.values(), self._clock())
        table.copy_sources = {}
        self._note(table)

    def release(self, table: TwinTable) -> int:
        """Gives everything back, once; returns how many blocks."""
        if self.closed:
            return 0
        if table.closed:
            self.hands.counters["second_releases"] += 1
            return 0
        held = table.held()
        self.hands.drop(held, self._clock())
        table.closed = True
        table.numbers, table.keys, table.copy_sources = [], [], {}
        self._note(table)
        return len(held)

    def force_release(self, table: TwinTable, cause: str) -> int:
        """`release`, counted by cause."""
        self._check()
        if not table.closed:
            self._forced[cause] += 1
        return self.release(table)

    def evict(self, count: int) -> int:
        """Frees up to `count` idle leaves, oldest first."""
        self._check()
        return eviction.evict(self.hands, count)

    def reset(self) -> int:
        """Drops everything idle."""
        return self.evict(self.capacity_blocks)

    def stats(self) -> TwinStats:
        """One snapshot."""
        self._check()
        count = self.hands.counters
        return TwinStats(
            blocks=self._memory.counts(),
            open_tables=len(self.tables),
            allocation_failures={"full": count["failures_full"], "owed": 0},
            evictions={"idle": count["evictions"], "waiting": 0},
            evicted_while_held=0,
            cow_copies=count["cow_copies"],
            dedups=count["dedups"],
            hash_collisions=count["hash_collisions"],
            second_releases=count["second_releases"],
            forced_releases=dict(self._forced),
        )

    def held_blocks(self) -> int:
        """Distinct blocks that requests of this process hold."""
        self._check()
        return len(+self.hands.refs)

    def indexed_keys(self) -> bytes:
        """The keys of all indexed blocks, packed."""
        self._check()
        return b"".join(self._memory.blocks[number].key for number in self._memory.numbers(State.INDEXED))

    def reclaim(self) -> list[Reclaimed]:
        """Gives back what dead processes left."""
        self._check()
        return recovery.reclaim(self._memory, self._memory.died)

    def tidy(self) -> TidyReport:
        """One tidy pass."""
        self._check()
        reclaimed, restored, recounted = recovery.tidy(self._memory)
        late = sum(self.index_late(table) for table in sorted(self.tables, key=lambda table: table.request_id))
        return TidyReport(reclaimed, restored, recounted, late)

    def check_integrity(self) -> str:
        """'' or the first violation in the whole region."""
        self._check()
        return self._integrity()

    def close(self) -> None:
        """Gives back what is open and leaves the slot."""
        if self.closed:
            return
        for table in sorted(self.tables, key=lambda table: table.request_id):
            self.force_release(table, "pool closed")
        self.hands.flush_local()
        self.closed = True
        self._leave(self)

    def _note(self, table: TwinTable) -> None:
        if table.held():
            self.tables.add(table)
        else:
            self.tables.discard(table)

    def _check(self, table: TwinTable | None = None) -> None:
        if self.closed:
            raise PoolError("the pool is closed in this process")
        if table is not None and table.closed:
            raise PoolError(f"the table of {table.request_id!r} is closed")
