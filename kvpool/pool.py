"""The pool: blocks for requests, shared by equal prefixes, kept after use, given up oldest first.

The order of a request:

1. `match` the keys of its full blocks. Each block is held FIRST and then verified, so nothing matched can be evicted
   by what follows.
2. `allocate` the rest, all or nothing: local cache, free blocks, then eviction of idle leaves. Whether it can succeed
   is known before anything changes, because every idle indexed block can be evicted (a holder of a block holds all its
   parents).
3. The engine writes KV bytes; each time a block is full, `seal` it. Only then does it become matchable. When another
   block has the key already, the request moves over to that one. A key that is indexed with other tokens or another
   parent is a collision: the block stays sealed and private.
4. To write into a sealed block, `copy_on_write`: a private copy takes its place; the source stays held until
   `finish_copy`.
5. `release`, exactly once. Backwards, so tails are reusable before heads. `force_release` is the same with an alarm.

Limits: mutations are serialised by one `threading.Lock` per pool, and one process mutates a region (a second
`Pool.create` on it is refused); other processes may attach and read. Requests larger than the pool are the caller's to
refuse.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

from kvpool import integrity, recovery, stats
from kvpool import slot as process_slot
from kvpool.block_table import BlockTable
from kvpool.blocks import Blocks
from kvpool.errors import PoolError
from kvpool.eviction import Eviction
from kvpool.index import NOT_FOUND, PrefixIndex
from kvpool.keys import KEY_BYTES, encode_tokens
from kvpool.region import Region
from kvpool.sharing import Sharing
from kvpool.stats import PoolStats

_log = logging.getLogger(__name__)
_ALARM_BLOCKS = 64
"""Block numbers named in one alarm; a long prompt holds thousands."""
_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """The blocks of one region, for one process. Thread-safe; also a context manager that closes.

    Every method raises PoolError once the pool or its region is closed (or inherited by fork), and for a closed table
    where it needs an open one.
    """

    def __init__(self, region: Region, slot: int, clock: Callable[[], int]) -> None:
        """For `create` only: `slot` is locked and nobody else has one."""
        self.geometry = region.geometry
        self.capacity_blocks = region.capacity_blocks
        self._region = region
        self._clock = clock
        self._lock = threading.Lock()
        self._tables: set[BlockTable] = set()
        self._forced: Counter[str] = Counter()
        self._closed = False
        self._control = region.control()
        recovered = recovery.recover(self._control)
        process_slot.sign(self._control, slot, clock())
        self._index = PrefixIndex(self._control)
        self._eviction = Eviction(self._index, self.capacity_blocks)
        self._blocks = Blocks(self._control, slot, self._eviction.push)
        self._eviction.connect(self._blocks)
        self._sharing = Sharing(self._blocks, self._index)
        self._blocks.count("recovered_blocks", recovered)
        _open_pools.add(self)

    @classmethod
    def create(cls, region: Region, *, clock: Callable[[], int] = time.monotonic_ns) -> Pool:
        """Takes a process slot of `region` and returns its pool. `clock` gives monotonic nanoseconds. Close it before
        the region.

        What an earlier life of the region left behind is repaired: complete blocks stay matchable, the rest is free.
        Raises PoolError when a living process (or another pool of this one) mutates the region.
        """
        return cls(region, process_slot.take(region), clock)

    def table(self, request_id: str) -> BlockTable:
        """Returns a new empty table for a request."""
        return BlockTable(request_id, self.release)

    def match(self, table: BlockTable, keys: Sequence[bytes], token_ids: Sequence[int] | None = None) -> int:
        """Holds the longest indexed chain of `keys` for `table` (which must be empty); returns its number of blocks.

        Appends to `table.blocks` and `table.keys` and renews last use. With `token_ids` (at least len(keys) *
        block_tokens), stored ids are compared, and a difference ends the match and is counted. Raises PoolError when
        the table is not empty.
        """
        step = 4 * self.geometry.block_tokens
        data = None if token_ids is None else encode_tokens(token_ids)
        if data is not None and len(data) < len(keys) * step:
            raise ValueError(f"{len(keys)} keys need {len(keys) * step // 4} token ids, got {len(data) // 4}")
        with self._lock:
            self._check_usable()
            self._check_open(table)
            if table.blocks or table.copy_sources:
                raise PoolError(f"{table.request_id!r} has {len(table.blocks)} blocks already; match comes first")
            table.blocks = self._sharing.hold_chain(keys, data, step, self._clock())
            table.keys = list(keys[: len(table.blocks)])
            self._note_holder(table)
            return len(table.blocks)

    def peek(self, keys: Sequence[bytes]) -> int:
        """Returns the length in blocks of the longest indexed chain of `keys`. Holds and counts nothing."""
        with self._lock:
            self._check_usable()
            return self._sharing.chain_length(keys)

    def allocate(self, table: BlockTable, count: int) -> bool:
        """Appends `count` blocks, mutable and ours, to `table.blocks`, or changes nothing and returns False."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        with self._lock:
            self._check_usable()
            self._check_open(table)
            taken = self._take(table, count)
            if taken is None:
                return False
            table.blocks.extend(taken)
            self._note_holder(table)
            return True

    def _take(self, table: BlockTable, count: int) -> list[int] | None:
        """Returns exactly `count` new blocks held by `table`, evicting if need be; None when there are not so many."""
        blocks = self._blocks
        short = count - len(blocks.local) - blocks.free
        if short > blocks.idle:
            blocks.count("allocation_failures")
            return None
        if short > 0:
            evicted = self._eviction.evict(short)
            assert evicted == short, f"{blocks.idle} blocks are idle but only {evicted} of {short} could be evicted"
        evicted = max(0, short)
        from_local = min(count, len(blocks.local))
        taken = blocks.take(count, table.tag)
        assert len(taken) == count, f"{count} blocks were there to take but only {len(taken)} were found"
        used = blocks.held
        blocks.count("allocated_local_blocks", from_local)
        blocks.count("allocated_free_blocks", count - from_local - evicted)
        blocks.count("allocated_evict_blocks", evicted)
        blocks.count("allocations")
        blocks.count("requested_blocks", count)
        blocks.count("used_blocks_sum", used)
        blocks.count_peak("peak_requested_blocks", count)
        blocks.count_peak("peak_used_blocks", used)
        return taken

    def available(self) -> int:
        """Returns free + local + evictable blocks; a hint, because others may take them."""
        self._check_usable()
        blocks = self._blocks
        return blocks.free + len(blocks.local) + blocks.idle

    def unused(self) -> int:
        """Returns the blocks that hold nothing, cached or in use; a hint, because others may take them."""
        self._check_usable()
        return self._blocks.free + len(self._blocks.local)

    def seal(self, table: BlockTable, position: int, key: bytes, token_ids: Sequence[int]) -> int:
        """Declares the block at `position` complete, with `key` and its block_tokens ids; returns the block now
        there.

        Appends `key` to `table.keys`. If the key is indexed (same parent, same tokens), the table moves over to that
        block and its own is given back. Raises PoolError unless `position` is the first unsealed one and its block
        mutable and ours.
        """
        if len(key) != KEY_BYTES or len(token_ids) != self.geometry.block_tokens:
            raise ValueError(
                f"seal needs a key of {KEY_BYTES} bytes and {self.geometry.block_tokens} token ids, "
                f"got {len(key)} and {len(token_ids)}"
            )
        tokens = encode_tokens(token_ids)
        with self._lock:
            self._check_usable()
            self._check_open(table)
            if position != len(table.keys) or position >= len(table.blocks):
                raise PoolError(
                    f"{table.request_id!r} has {len(table.keys)} of {len(table.blocks)} blocks sealed; "
                    f"position {position} is not the next one"
                )
            own = table.blocks[position]
            if not self._blocks.owned(own):
                raise PoolError(f"block {own} of {table.request_id!r} is not its own to seal; copy it first")
            now = self._clock()
            parent = table.blocks[position - 1] if position else NOT_FOUND
            block = self._sharing.seal(own, parent, key, tokens, now)
            if own in table.copy_sources:  # complete, so the bytes it began with have been copied
                self._blocks.drop(table.copy_sources.pop(own), now)
            table.blocks[position] = block
            table.keys.append(key)
            return block

    def copy_on_write(self, table: BlockTable, position: int) -> tuple[int, int] | None:
        """Makes the block at `position` private and mutable. Returns (source, target), whose bytes the caller copies
        before `finish_copy`; (b, b) when it was so already; None, with nothing changed, when no block can be had.

        Drops `table.keys[position:]`. Raises PoolError when `position` is not in the table or a later block is shared
        (its content follows from this one).
        """
        with self._lock:
            self._check_usable()
            self._check_open(table)
            if not 0 <= position < len(table.blocks):
                raise PoolError(f"{table.request_id!r} has {len(table.blocks)} blocks, no position {position}")
            source = table.blocks[position]
            if self._blocks.owned(source):
                return source, source
            if len(table.keys) > position + 1:
                raise PoolError(f"{table.request_id!r} has sealed blocks after position {position}; copy the last one")
            taken = self._take(table, 1)
            if taken is None:
                return None
            table.blocks[position] = taken[0]
            table.copy_sources[taken[0]] = source
            del table.keys[position:]
            self._blocks.count("cow_copies")
            return source, taken[0]

    def finish_copy(self, table: BlockTable) -> None:
        """The bytes of every `copy_on_write` of this table have been copied: lets go of the sources. Repeatable."""
        with self._lock:
            self._check_usable()
            self._check_open(table)
            now = self._clock()
            self._blocks.drop_all(table.copy_sources.values(), now)
            table.copy_sources = {}
            self._note_holder(table)

    def release(self, table: BlockTable) -> int:
        """Gives back everything `table` holds and closes it; returns how many blocks. A second call is a counted no-op.

        After the pool's `close()`, which has closed every table that held something, it does nothing.
        """
        with self._lock:
            if self._closed:
                return 0
            self._check_usable()
            return self._release(table)

    def _release(self, table: BlockTable) -> int:
        if table.closed:
            self._blocks.count("second_releases")
            return 0
        held = table.held()
        now = self._clock()
        self._blocks.drop_all(held, now)
        table.closed = True
        table.blocks, table.keys, table.copy_sources = [], [], {}
        self._note_holder(table)
        self._blocks.set_slot_word("heartbeat", now)
        return len(held)

    def force_release(self, table: BlockTable, cause: str) -> int:
        """`release` on the abnormal path: logs an alarm with request, blocks and cause, and counts it by cause."""
        with self._lock:
            self._check_usable()
            return self._force_release(table, cause)

    def _force_release(self, table: BlockTable, cause: str) -> int:
        if not table.closed:
            held = table.held()
            some = f"{held[:_ALARM_BLOCKS]}{' ...' if len(held) > _ALARM_BLOCKS else ''}"
            _log.warning("forced release of %d blocks of %s (%s): %s", len(held), table.request_id, cause, some)
            self._forced[cause] += 1
            self._blocks.count("forced_releases")
        return self._release(table)

    def evict(self, count: int) -> int:
        """Frees up to `count` idle indexed leaves, oldest first (a parent becomes a leaf with its last child); how
        many.
        """
        with self._lock:
            self._check_usable()
            return self._eviction.evict(count)

    def reset(self) -> int:
        """Drops every idle indexed block; returns how many. Held blocks stay."""
        return self.evict(self.capacity_blocks)

    def count_prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        """Counts one request's prompt tokens and how many of them were found. Call it once per request."""
        if not 0 <= hit_tokens <= queried_tokens:
            raise ValueError(f"{hit_tokens} of {queried_tokens} tokens cannot be hits")
        with self._lock:
            self._check_usable()
            self._blocks.count("prefix_queried_tokens", queried_tokens)
            self._blocks.count("prefix_hit_tokens", hit_tokens)

    def stats(self) -> PoolStats:
        """Returns one consistent snapshot."""
        with self._lock:
            self._check_usable()
            return stats.snapshot(self._blocks, len(self._tables), self._forced)

    def held_blocks(self) -> int:
        """Returns the number of distinct blocks that some table holds."""
        self._check_usable()
        return self._blocks.held

    def indexed_keys(self) -> bytes:
        """Returns the keys of all indexed blocks, packed, in no order: what a directory should list."""
        with self._lock:
            self._check_usable()
            return self._blocks.indexed_keys()

    def check_integrity(self) -> str:
        """Returns '' or the first violation in words (`integrity.py` lists what is checked)."""
        with self._lock:
            self._check_usable()
            return integrity.check(self._blocks, self._index, self._tables)

    def close(self) -> None:
        """Gives back what open tables hold (with an alarm for each), leaves the slot, keeps the region. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _open_pools.discard(self)
            if not self._region.closed:
                for table in list(self._tables):
                    self._force_release(table, "pool closed")
                self._blocks.flush_local()
                self._blocks.set_slot_word("pid", 0)
                self._region.unlock_slot(self._blocks.slot)
            self._control.release()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget_after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have had it
        self._closed = True

    def _note_holder(self, table: BlockTable) -> None:
        """Keeps the set of tables that hold something, and what the slot tells about it."""
        if table.blocks or table.copy_sources:
            self._tables.add(table)
        else:
            self._tables.discard(table)
        self._blocks.set_slot_word("held_blocks", self._blocks.held)
        self._blocks.set_slot_word("open_tables", len(self._tables))

    def _check_usable(self) -> None:
        if self._closed or self._region.closed:
            raise PoolError(f"the pool over {self._region.path} is closed in this process")

    @staticmethod
    def _check_open(table: BlockTable) -> None:
        if table.closed:
            raise PoolError(f"the table of {table.request_id!r} is closed")


def _after_fork_in_child() -> None:
    for pool in list(_open_pools):
        pool._forget_after_fork()
    _open_pools.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
