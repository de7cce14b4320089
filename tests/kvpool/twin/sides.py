"""The two things a state machine drives at once: the real pool and its twin, behind one face.

A side is one region. Processes attach to it and leave it, orderly or not. All of them live in this process, each over
a `Region.attach` of its own, whose locks are as separate as those of separate processes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from kvpool import BlockGeometry, Pool, Region
from kvpool import region as region_module
from tests.kvpool.twin.pool import TwinPool
from tests.kvpool.twin.twin import Twin


class Clock:
    """What all sides take for the time: it goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def tick(self) -> None:
        """A nanosecond goes by."""
        self.now += 1


class StatsLike(Protocol):
    """What the machines ask by name; what they compare, see `traffic.COMPARED`."""

    @property
    def blocks(self) -> Mapping[str, int]: ...
    @property
    def evicted_while_held(self) -> int: ...
    @property
    def hash_collisions(self) -> int: ...


class PoolLike(Protocol):
    """The part of a pool's public face that the machines use. Tables are those of the same side."""

    def table(self, request_id: str) -> Any: ...
    def match(self, table: Any, keys: Sequence[bytes], token_ids: Sequence[int] | None = None) -> int: ...
    def peek(self, keys: Sequence[bytes]) -> int: ...
    def allocate(self, table: Any, count: int) -> bool: ...
    def seal(self, table: Any, position: int, key: bytes, token_ids: Sequence[int]) -> int: ...
    def copy_on_write(self, table: Any, position: int) -> tuple[int, int] | None: ...
    def finish_copy(self, table: Any) -> None: ...
    def release(self, table: Any) -> int: ...
    def force_release(self, table: Any, cause: str) -> int: ...
    def evict(self, count: int) -> int: ...
    def reset(self) -> int: ...
    def available(self) -> int: ...
    def unused(self) -> int: ...
    def held_blocks(self) -> int: ...
    def indexed_keys(self) -> bytes: ...
    def check_integrity(self) -> str: ...
    def stats(self) -> StatsLike: ...
    def reclaim(self) -> Sequence[Any]: ...
    def tidy(self) -> Any: ...
    def close(self) -> None: ...


class Side(Protocol):
    """One region."""

    def attach(self) -> PoolLike:
        """A process comes and reclaims whoever is dead."""
        ...

    def kill(self, pool: PoolLike) -> None:
        """The process of `pool` vanishes; its words stay."""
        ...

    def prefer(self, keys: frozenset[bytes]) -> None:
        """These leaves go first where the order is free, if this side can be told."""
        ...

    def close(self) -> None:
        """The region goes."""
        ...


class RealSide:
    """A real region on a file in `directory`."""

    def __init__(self, directory: Path, capacity: int, block_tokens: int, clock: Callable[[], int]) -> None:
        geometry = BlockGeometry(1, 1, 1, block_tokens, "float16")
        self._first = Region.create(directory, "region", geometry, capacity, bytes(32), random.Random(0))
        self._clock = clock
        self._regions: dict[int, Region] = {}

    def attach(self) -> PoolLike:
        region = Region.attach(self._first.path)
        pool = Pool.create(region, clock=self._clock)
        self._regions[id(pool)] = region
        return cast(PoolLike, pool)

    def kill(self, pool: PoolLike) -> None:
        """Loses the locks as a death does; the objects forget the region, and clean nothing up."""
        region = self._regions.pop(id(pool))
        region_module._open_regions.discard(region)
        cast(Pool, pool)._forget_after_fork()
        region._forget_after_fork()

    def prefer(self, keys: frozenset[bytes]) -> None:
        """The real pool goes its own way."""

    def close(self) -> None:
        for region in self._regions.values():
            region.close()
        self._first.close()
        os.unlink(self._first.path)


class TwinSide:
    """A twin region; the lowest slot that no living process has is taken. `exact_order`: see `memory.Memory`."""

    def __init__(self, capacity: int, block_tokens: int, clock: Callable[[], int], exact_order: bool) -> None:
        self.twin = Twin(capacity, block_tokens, clock, exact_order=exact_order)

    def attach(self) -> PoolLike:
        return self.twin.attach(next(slot for slot in range(64) if slot not in self.twin.alive))

    def kill(self, pool: PoolLike) -> None:
        assert isinstance(pool, TwinPool)
        self.twin.kill(pool.slot)

    def prefer(self, keys: frozenset[bytes]) -> None:
        self.twin.memory.prefer = keys

    def close(self) -> None:
        assert self.twin.check() == ""
