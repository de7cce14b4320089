"""The pool: blocks for requests, shared by equal prefixes, kept after use, given up oldest first.

The order of a request:

1. `match` the keys of its full blocks. Each block is held FIRST and then verified, so nothing matched can be evicted
   by what follows.
2. `allocate` the rest, all or nothing: local cache, free blocks, then eviction of idle leaves.
3. The engine writes KV bytes; each time a block is full, `seal` it. Only then does it become matchable. When another
   block has the key already, the request moves over to that one. A key that is indexed with other tokens or another
   parent is a collision: the block stays sealed and private.
4. To write into a sealed block, `copy_on_write`: a private copy takes its place; the source stays held until
   `finish_copy`.
5. `release`, exactly once. Backwards, so tails are reusable before heads. `force_release` is the same with an alarm.

Several processes use one region at the same time, each through a Pool of its own, and none of them ever waits for another
(`kernels/`). A process may die at any instruction: the kernel drops the lock on its slot, and whoever looks next
(`reclaim`, `tidy`) gives back what it had. What it had sealed stays.

Threads. A kernel call keeps the interpreter's lock, so calls of one process never overlap, and the two that every request
makes, `allocate` and `release`, need no other. What takes several calls is under a lock of the pool's own.

Limits: 64 processes a region; needs an interpreter with a global lock. Requests larger than the pool are the caller's to
refuse.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from kvpool import integrity, stats
from kvpool import slot as process_slot
from kvpool.block_table import BlockTable, Record
from kvpool.control import Control
from kvpool.errors import GuardViolation, PoolError
from kvpool.guard import Guard
from kvpool.kernels import entries
from kvpool.kernels.census import CONDITIONS
from kvpool.kernels.clock import READ_IT
from kvpool.kernels.context import CLOSED, CLOSING, Context
from kvpool.kernels.index import NOT_FOUND
from kvpool.keys import KEY_BYTES, encode_tokens
from kvpool.layout import COUNTERS, HEADER_WORDS, SLOT_WORD_COUNT, SLOTS
from kvpool.reclaimed import Reclaimed, TidyReport, blocks_of
from kvpool.region import Region
from kvpool.slot import SlotLoad
from kvpool.stats import PoolStats
from kvpool.words import INDEXED, STATE_MASK

_log = logging.getLogger(__name__)
_ALARM_BLOCKS = 64
"""Block numbers named in one alarm; a long prompt holds thousands."""
_SPARE_RECORDS = 64
_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """The blocks of one region, for one process. Thread-safe; also a context manager that closes.

    Every method raises PoolError once the pool or its region is closed (or inherited by fork), and for a closed table
    where it needs an open one.
    """

    def __init__(
        self, region: Region, control: Control, slot: int, clock: Callable[[], int], floor_blocks: int, guard: bool
    ) -> None:
        """For `create` only: `slot` is locked, `control` a window of its own."""
        self.geometry = region.geometry
        self.capacity_blocks = region.capacity_blocks
        self.slot = slot
        self.floor_blocks = floor_blocks
        self.guard = guard
        self._region = region
        self._control = control
        self._clock = clock
        self._reads_clock = clock is time.monotonic_ns
        self._lock = threading.Lock()
        self._tables: set[BlockTable] = set()
        self._spare: list[Record] = []
        self._forced: Counter[str] = Counter()
        self._closed = False
        self._context = Context(control, slot)
        self._ctx = self._context.address
        region.on_close(self._shut)
        self._counts = array("q", bytes(8 * len(CONDITIONS)))
        self._first_counter = slot * SLOT_WORD_COUNT
        self._watch = Guard(control, region.kv_memory, self.geometry, region.incarnation, slot) if guard else None

    @classmethod
    def create(
        cls,
        region: Region,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        floor_blocks: int = 0,
        guard: bool = False,
    ) -> Pool:
        """Takes a process slot of `region` and returns its pool. `clock` gives monotonic nanoseconds, of one clock for
        all processes of the region. Close it before the region.

        `floor_blocks`: so many this process may always hold, whatever others ask for; the floors of all should fit the
        capacity. `guard`: verify blocks on the way (`guard.py`). What dead processes had is given back first. Raises
        PoolError when 64 processes use the region already.
        """
        if not 0 <= floor_blocks <= region.capacity_blocks:
            raise ValueError(f"a floor is between 0 and the capacity of {region.capacity_blocks}, got {floor_blocks}")
        control = region.control()
        try:
            slot = process_slot.take(region, control)
        except BaseException:
            control.release()
            raise
        pool = cls(region, control, slot, clock, floor_blocks, guard)
        pool._join()
        return pool

    def _join(self) -> None:
        """Cleans up behind the slot's last user, if that died, and signs."""
        with self._lock:
            reclaimed = [self._reclaim_slot(self.slot)] if self._word(self.slot, "pid") else []
            process_slot.retire(self._control, self.slot)
            process_slot.sign(self._control, self.slot, self._clock(), self.floor_blocks)
            entries.announce(self._ctx)
            self._note_reclaimed(reclaimed)
            _open_pools.add(self)
        self.reclaim()

    def rejoin(self) -> Pool:
        """Returns a pool of this process's own over the same region: what a forked child needs, whose inherited pool is
        closed. Attaches anew; close the pool, then its `region`.
        """
        region = Region.attach(self._region.path)
        return Pool.create(region, clock=self._clock, floor_blocks=self.floor_blocks, guard=self.guard)

    @property
    def closed(self) -> bool:
        """Whether it was closed here, or inherited by fork."""
        return self._closed or self._region.closed

    @property
    def region(self) -> Region:
        """The region it is in."""
        return self._region

    # A request's way

    def table(self, request_id: str) -> BlockTable:
        """Returns a new empty table for a request."""
        return BlockTable(request_id, self, self._spare.pop() if self._spare else Record())

    def match(self, table: BlockTable, keys: Sequence[bytes], token_ids: Sequence[int] | None = None) -> int:
        """Holds the longest indexed chain of `keys` for `table` (which must be empty); returns its number of blocks.

        Fills `table` and renews last use. With `token_ids` (at least len(keys) * block_tokens), stored ids are compared,
        and a difference ends the match and is counted. Raises PoolError when the table is not empty.
        """
        packed = array("B", b"".join(keys))
        if len(packed) != KEY_BYTES * len(keys):
            raise ValueError(f"keys have {KEY_BYTES} bytes each")
        tokens = array("B")
        if token_ids is not None:
            step = 4 * self.geometry.block_tokens
            tokens = array("B", encode_tokens(token_ids))
            if len(tokens) < len(keys) * step:
                raise ValueError(f"{len(keys)} keys need {len(keys) * step // 4} token ids, got {len(tokens) // 4}")
        with self._lock:
            self._check_usable()
            self._check_open(table)
            if len(table) or table.copy_sources:
                raise PoolError(f"{table.request_id!r} has {len(table)} blocks already; match comes first")
            table.record.reserve(len(keys))
            now = self._clock()
            ids = tokens.buffer_info()[0] if token_ids is not None else 0
            length = entries.match(self._ctx, table.record.address, packed.buffer_info()[0], len(keys), ids, now)
            table.keys = list(keys) if length == len(keys) else list(keys[:length])
            if length:
                self._tables.add(table)
            if self._watch is not None:
                self._watch.matched(table.blocks, keys)
            return length

    def peek(self, keys: Sequence[bytes]) -> int:
        """Returns the length in blocks of the longest indexed chain of `keys`. Holds and counts nothing."""
        packed = array("B", b"".join(keys))
        with self._lock:
            self._check_usable()
            return entries.peek(self._ctx, packed.buffer_info()[0], len(keys))

    def allocate(self, table: BlockTable, count: int) -> bool:
        """Appends `count` blocks, mutable and ours, to `table`, or changes nothing and returns False."""
        if self._watch is None and not table.closed:
            now = READ_IT if self._reads_clock else self._clock()
            done = entries.allocate(self._ctx, table.record.address, count, now)
            if done > 0:
                self._tables.add(table)
                return True
            if not done:
                return False
        with self._lock:
            self._check_usable()
            self._check_open(table)
            if count < 0:
                raise ValueError(f"cannot allocate {count} blocks")
            table.record.reserve(len(table) + min(count, self.capacity_blocks))
            if self._watch is not None:
                self._watch.trying(table, count)
            if count and not entries.allocate(self._ctx, table.record.address, count, self._clock()):
                if self._watch is not None:
                    self._watch.undone(table, count)
                return False
            if count:
                self._tables.add(table)
            if self._watch is not None:
                self._watch.took(table.blocks[len(table) - count :], self._clock())
            return True

    def available(self) -> int:
        """Returns free + evictable blocks and those of our local cache; a hint, because others may take them."""
        with self._lock:
            self._check_usable()
            counts = self._census()
            return counts["free"] + counts["cached"] + self._context.local

    def unused(self) -> int:
        """Returns the blocks that hold nothing, cached or in use; a hint, because others may take them."""
        with self._lock:
            self._check_usable()
            counts = self._census()
            return counts["free"] + counts["local"]

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
        named = array("B", key + encode_tokens(token_ids))
        with self._lock:
            self._check_usable()
            self._check_open(table)
            if position != len(table.keys) or position >= len(table):
                raise PoolError(
                    f"{table.request_id!r} has {len(table.keys)} of {len(table)} blocks sealed; "
                    f"position {position} is not the next one"
                )
            own = table.block(position)
            now = self._clock()
            if self._watch is not None:
                self._watch.sealing(own, key, named[KEY_BYTES:].tobytes(), now)
                self._watch.freeing(self._held_once(table.copy_sources.get(own, own), but=own), now)
            at = named.buffer_info()[0]
            block = entries.seal(self._ctx, table.record.address, position, at, at + KEY_BYTES, now)
            if block < 0:
                raise PoolError(f"block {own} of {table.request_id!r} is not its own to seal; copy it first")
            if own in table.copy_sources:  # complete, so the bytes it began with have been copied
                entries.drop(self._ctx, table.copy_sources.pop(own), now)
            table.keys.append(key)
            if self._watch is not None:
                self._watch.sealed(own, block, key)
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
            if not 0 <= position < len(table):
                raise PoolError(f"{table.request_id!r} has {len(table)} blocks, no position {position}")
            before = table.block(position)
            if len(table.keys) > position + 1 and not entries.is_own(self._ctx, before):
                raise PoolError(f"{table.request_id!r} has sealed blocks after position {position}; copy the last one")
            source = entries.copy_on_write(self._ctx, table.record.address, position, self._clock())
            if source == NOT_FOUND:
                return None
            target = table.block(position)
            if target != source:
                table.copy_sources[target] = source
                del table.keys[position:]
                if self._watch is not None:
                    self._watch.took([target], self._clock())
            return source, target

    def finish_copy(self, table: BlockTable) -> None:
        """The bytes of every `copy_on_write` of this table have been copied: lets go of the sources. Repeatable."""
        with self._lock:
            self._check_usable()
            self._check_open(table)
            now = self._clock()
            if self._watch is not None:
                self._watch.freeing(self._held_once(*table.copy_sources.values()), now)
            self._drop_sources(table, now)

    def _drop_sources(self, table: BlockTable, now: int) -> None:
        sources, table.copy_sources = table.copy_sources, {}
        for source in sources.values():
            entries.drop(self._ctx, source, now)

    def release(self, table: BlockTable) -> int:
        """Gives back everything `table` holds and closes it; returns how many blocks. A second call is a counted no-op.

        After the pool's `close()`, which has closed every table that held something, it does nothing.
        """
        if self._watch is None and not table.closed and not table.copy_sources:
            now = READ_IT if self._reads_clock else self._clock()
            held = entries.release(self._ctx, table.record.address, now)
            if held >= 0:
                self._forget(table, held)
                return held
        with self._lock:
            if self._closed:
                return 0
            self._check_usable()
            return self._release(table)

    def give_up(self, table: BlockTable) -> int:
        """`release` of a request that makes room for others and waits: counted as evictions of that class."""
        with self._lock:
            self._check_usable()
            self._count("evictions_waiting", len(table))
            return self._release(table)

    def _release(self, table: BlockTable) -> int:
        if table.closed:
            self._count("second_releases")
            return 0
        if self._watch is not None:
            self._watch.freeing(self._held_once(*table.held()), self._clock())
        now = self._clock()
        held = len(table.copy_sources)
        if held:
            self._drop_sources(table, now)
        held += entries.release(self._ctx, table.record.address, now)
        self._forget(table, held)
        return held

    def _forget(self, table: BlockTable, held: int) -> None:
        table.closed = True
        table.keys = []
        if held:
            self._tables.remove(table)
            if len(self._spare) < _SPARE_RECORDS:
                self._spare.append(table.record)

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
            self._count("forced_releases")
        try:
            return self._release(table)
        except GuardViolation as found:  # which is told once, and must not keep the blocks from going
            _log.error("%s", found)
            return self._release(table)

    # Room

    def evict(self, count: int) -> int:
        """Frees up to `count` idle indexed leaves, oldest first (a parent becomes a leaf with its last child); how
        many.
        """
        with self._lock:
            self._check_usable()
            return entries.evict(self._ctx, count, self._clock())

    def reset(self) -> int:
        """Drops every idle indexed block; returns how many. Held blocks stay."""
        return self.evict(self.capacity_blocks)

    def demand(self) -> int:
        """Returns how many blocks this process should give up now for others that wait in line before it; nearly always
        0, and then one look at one word.
        """
        with self._lock:
            self._check_usable()
            kept = self._watch.local() if self._watch is not None else {}
            demanded = entries.demanded(self._ctx, self._clock())
            if self._watch is not None:
                self._watch.yielded(kept)
            return demanded

    def wait_in_line(self, wanted_blocks: int) -> None:
        """This process waits for `wanted_blocks`, holding nothing for the request that needs them; or, with the place it
        has, may need so many more. Draws a ticket, unless it has one, and tells the others.
        """
        if not 0 < wanted_blocks <= self.capacity_blocks:
            raise ValueError(f"nobody can wait for {wanted_blocks} of {self.capacity_blocks} blocks")
        with self._lock:
            self._check_usable()
            entries.wait_in_line(self._ctx, wanted_blocks, self._clock())

    def leave_line(self) -> None:
        """This process waits no longer. Repeatable."""
        with self._lock:
            self._check_usable()
            entries.leave_line(self._ctx)

    # After deaths

    def reclaim(self) -> list[Reclaimed]:
        """Gives back what dead processes had, each with an alarm in the log; returns what that was."""
        with self._lock:
            self._check_usable()
            reclaimed = []
            for slot in range(SLOTS):
                if slot == self.slot or not self._word(slot, "pid") or not self._region.lock_slot(slot):
                    continue
                try:
                    if self._word(slot, "pid"):
                        reclaimed.append(self._reclaim_slot(slot))
                finally:
                    self._region.unlock_slot(slot)
            self._note_reclaimed(reclaimed)
            return reclaimed

    def _reclaim_slot(self, slot: int) -> Reclaimed:
        """Gives back what the dead process of `slot`, whose lock we hold, had."""
        control = self._control
        record = Reclaimed(
            slot, self._word(slot, "pid"), process_slot.text(control, slot), blocks_of(control, slot), "dead"
        )
        if self._watch is not None:
            self._watch.reclaiming(slot, self._clock())
        entries.reclaim_slot(self._ctx, slot)
        entries.withdraw(self._ctx, slot)
        process_slot.retire(control, slot)
        return record

    def _note_reclaimed(self, reclaimed: list[Reclaimed]) -> None:
        for record in reclaimed:
            self._count("reclaimed_slots")
            self._count("reclaimed_blocks", record.count)
            _log.warning("%s", record.describe(_ALARM_BLOCKS))

    def tidy(self) -> TidyReport:
        """Puts right what deaths and contention left behind, in one pass; safe at any time, in any process."""
        reclaimed = self.reclaim()
        with self._lock:
            self._check_usable()
            restored = entries.restore_free_bits(self._ctx)
            wanted = self._control.header[HEADER_WORDS["recount"]] != 0
            recounted = entries.recount_children(self._ctx) if wanted else 0
        return TidyReport(tuple(reclaimed), restored, recounted, self.catch_up())

    def catch_up(self) -> int:
        """What each process has to do for itself, now and then: shows that it is at work, gives up its local cache while
        others wait, and indexes sealed blocks of its requests that could not be indexed when they were sealed; how many.
        """
        with self._lock:
            self._check_usable()
            kept = self._watch.local() if self._watch is not None else {}
            entries.yield_local(self._ctx)
            now = self._clock()
            process_slot.set_word(self._control, self.slot, "heartbeat", now)
            done = sum(
                entries.index_late(self._ctx, table.record.address, now)
                for table in list(self._tables)
                if table.unindexed
            )
            if self._watch is not None:
                self._watch.yielded(kept)
                self._watch.parked()
            return done

    # What others see

    def report_load(self, load: SlotLoad) -> None:
        """Shows in our slot how busy the replica is, for whoever publishes the region."""
        with self._lock:
            self._check_usable()
            process_slot.set_load(self._control, self.slot, load)
            process_slot.set_word(self._control, self.slot, "heartbeat", self._clock())

    def loads(self) -> list[SlotLoad]:
        """Returns what the replicas of all processes that live have reported."""
        with self._lock:
            self._check_usable()
            return [
                load
                for slot in range(SLOTS)
                if self._word(slot, "pid")
                and (slot == self.slot or self._region.slot_in_use(slot))
                and (load := process_slot.load_of(self._control, slot)).replica_id
            ]

    def count_prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        """Counts one request's prompt tokens and how many of them were found. Call it once per request."""
        if not 0 <= hit_tokens <= queried_tokens:
            raise ValueError(f"{hit_tokens} of {queried_tokens} tokens cannot be hits")
        with self._lock:
            self._check_usable()
            self._count("prefix_queried_tokens", queried_tokens)
            self._count("prefix_hit_tokens", hit_tokens)

    def stats(self) -> PoolStats:
        """Returns one consistent snapshot."""
        with self._lock:
            self._check_usable()
            tries, retries = self._context.compare_and_swaps
            self._set_counter("cas_tries", tries)
            self._set_counter("cas_retries", retries)
            return stats.snapshot(self._control, self.slot, self._census(), len(self._tables), self._forced)

    def held_blocks(self) -> int:
        """Returns the number of distinct blocks that some table of this process holds."""
        self._check_usable()
        return self._context.held

    def indexed_keys(self) -> bytes:
        """Returns the keys of all indexed blocks, packed, in no order: what a directory should list."""
        with self._lock:
            self._check_usable()
            states = self._control.array("state") & np.uint64(STATE_MASK)
            return b"".join(self._control.key(block) for block in np.flatnonzero(states == INDEXED).tolist())

    def check_integrity(self) -> str:
        """Returns '' or the first violation in words (`integrity.py` lists what is checked)."""
        with self._lock:
            self._check_usable()
            return integrity.check(self._control, self._context, self.slot, self._tables, self._alone())

    def check_guard(self) -> None:
        """Verifies the region's header in guard mode. Raises GuardViolation."""
        if self._watch is not None:
            self._watch.check_header()

    def close(self) -> None:
        """Gives back what open tables hold (with an alarm for each), leaves the slot, keeps the region. Idempotent."""
        with self._lock:
            if self._closed:
                return
            _open_pools.discard(self)
            self._context.shut(CLOSING)
            if not self._region.closed:
                for table in list(self._tables):
                    self._force_release(table, "pool closed")
                entries.leave_line(self._ctx)
                kept = self._watch.local() if self._watch is not None else {}
                entries.flush_local(self._ctx)
                if self._watch is not None:
                    self._watch.yielded(kept)
                entries.reclaim_slot(self._ctx, self.slot)  # what a thread took while we closed
                entries.withdraw(self._ctx, self.slot)
                process_slot.retire(self._control, self.slot)
                self._region.unlock_slot(self.slot)
            self._closed = True
            self._shut()
            self._watch = None
            self._control.release()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shut(self) -> None:
        self._context.shut(CLOSED)

    def _forget_after_fork(self) -> None:
        self._shut()
        self._lock = threading.Lock()  # another thread of the parent may have had it
        self._closed = True

    # Within the lock

    def _census(self) -> dict[str, int]:
        entries.census(self._ctx, self._counts.buffer_info()[0])
        return dict(zip(CONDITIONS, self._counts, strict=True))

    def _alone(self) -> bool:
        return self._control.header[HEADER_WORDS["slots_used"]] & ~(1 << self.slot) == 0

    def _word(self, slot: int, name: str) -> int:
        return process_slot.word(self._control, slot, name)

    def _count(self, counter: str, amount: int = 1) -> None:
        self._control.slots[self._first_counter + COUNTERS[counter]] += amount

    def _set_counter(self, counter: str, value: int) -> None:
        self._control.slots[self._first_counter + COUNTERS[counter]] = value

    def _held_once(self, *blocks: int, but: int = NOT_FOUND) -> list[int]:
        """Those of `blocks` that no other request of this process holds."""
        return [block for block in blocks if block != but and self._context.refs[block] == 1]

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
