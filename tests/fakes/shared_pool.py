"""One pool as several processes see it, with the line and the floors played by the book.

The blocks are those of a real pool of this process. Each view counts the blocks its own tables hold and follows the
rules between processes: within its floor, or with the oldest ticket, a view may take what there is; else it leaves
what older tickets want and what the floors of others lack. `demand` is what older tickets want and is not free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from kvpool import BlockTable, Pool


class SharedPool:
    """A machine's pool: `view()` is what one process has of it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.views: list[PoolView] = []
        self.tickets_drawn = 0

    def view(self, floor_blocks: int = 0) -> PoolView:
        """One more process."""
        self.views.append(PoolView(self, floor_blocks))
        return self.views[-1]

    def draw(self) -> int:
        """The next ticket."""
        self.tickets_drawn += 1
        return self.tickets_drawn


class PoolView:
    """What a scheduler needs of a pool. Read `ticket` (0: not in line), `wanted`, `calls`, `matches`."""

    def __init__(self, shared: SharedPool, floor_blocks: int) -> None:
        self._shared = shared
        self._pool = shared.pool
        self.floor_blocks = floor_blocks
        self.geometry = self._pool.geometry
        self.capacity_blocks = self._pool.capacity_blocks
        self.guard = False
        self.ticket = 0
        self.wanted = 0
        self.calls: Counter[str] = Counter()
        self.matched_with_tokens: list[bool] = []
        self.guard_error: Exception | None = None
        self.indexes = True
        self._tables: set[BlockTable] = set()

    def as_pool(self) -> Pool:
        """This view, typed as what the scheduler takes."""
        return cast(Pool, self)

    def held_blocks(self) -> int:
        """Distinct blocks of this view's tables."""
        return len({block for table in self._tables for block in table.held()})

    def available(self) -> int:
        """Free in the whole pool, whoever may take it."""
        return self._pool.available()

    def table(self, request_id: str) -> BlockTable:
        """An empty table."""
        table = self._pool.table(request_id)
        self._tables.add(table)
        return table

    def match(self, table: BlockTable, keys: Sequence[bytes], token_ids: Sequence[int] | None = None) -> int:
        """As the pool's."""
        self.calls["match"] += 1
        self.matched_with_tokens.append(token_ids is not None)
        return self._pool.match(table, keys, token_ids)

    def peek(self, keys: Sequence[bytes]) -> int:
        """As the pool's."""
        return self._pool.peek(keys)

    def allocate(self, table: BlockTable, count: int) -> bool:
        """As the pool's, of what is not owed to others."""
        self.calls["allocate"] += 1
        return self._may_take(count) and self._pool.allocate(table, count)

    def copy_on_write(self, table: BlockTable, position: int) -> tuple[int, int] | None:
        """As the pool's, of what is not owed to others."""
        return self._pool.copy_on_write(table, position) if self._may_take(1) else None

    def finish_copy(self, table: BlockTable) -> None:
        """As the pool's."""
        self._pool.finish_copy(table)

    def seal(self, table: BlockTable, position: int, key: bytes, token_ids: Sequence[int]) -> int:
        """As the pool's; without `indexes` nobody finds the block under its key."""
        if self.indexes:
            return self._pool.seal(table, position, key, token_ids)
        block = self._pool.seal(table, position, bytes(byte ^ 1 for byte in key), token_ids)
        table.keys[position] = key
        return block

    def release(self, table: BlockTable) -> int:
        """As the pool's."""
        self._tables.discard(table)
        return self._pool.release(table)

    def give_up(self, table: BlockTable) -> int:
        """As the pool's."""
        self._tables.discard(table)
        return self._pool.give_up(table)

    def force_release(self, table: BlockTable, cause: str) -> int:
        """As the pool's."""
        self._tables.discard(table)
        return self._pool.force_release(table, cause)

    def count_prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        """As the pool's."""
        self._pool.count_prefix(queried_tokens, hit_tokens)

    def check_guard(self) -> None:
        """Raises `guard_error`, if there is one."""
        self.calls["check_guard"] += 1
        if self.guard_error is not None:
            raise self.guard_error

    def demand(self) -> int:
        """What older tickets want and is not free."""
        self.calls["demand"] += 1
        wanted = sum(view.wanted for view in self._older())
        return max(0, wanted - self.available()) if wanted else 0

    def wait_in_line(self, wanted_blocks: int) -> None:
        """Keeps an older ticket."""
        assert 0 < wanted_blocks <= self.capacity_blocks
        self.calls["wait_in_line"] += 1
        self.ticket = self.ticket or self._shared.draw()
        self.wanted = wanted_blocks

    def leave_line(self) -> None:
        """Idempotent."""
        self.calls["leave_line"] += 1
        self.ticket = self.wanted = 0

    def _older(self) -> list[PoolView]:
        return [v for v in self._shared.views if v.ticket and (not self.ticket or v.ticket < self.ticket)]

    def _may_take(self, count: int) -> bool:
        older = self._older()
        if self.held_blocks() + count <= self.floor_blocks or (self.ticket and not older):
            return True
        others = [view for view in self._shared.views if view is not self and view.floor_blocks]
        owed = sum(view.wanted for view in older)
        lacking = sum(max(0, view.floor_blocks - view.held_blocks()) for view in others)
        return self.available() - count >= owed + lacking
