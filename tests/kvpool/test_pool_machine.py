"""Any order of calls, on a small pool, with prompts over two tokens so that prefixes collide all the time.

The model knows what each block's KV bytes stand for: the whole token history up to the end of the block, written by the
request that filled it. After every match the matched blocks must hold exactly the prompt's prefixes. A block that was
reused too early, shared while mutable, or found under a stale key shows as a wrong history.
"""

from __future__ import annotations

import logging
import random
import tempfile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvpool import BlockGeometry, BlockTable, KeyRoot, KeySpace, Pool, Region

History = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Request:
    """A table and the tokens that its blocks stand for."""

    def __init__(self, table: BlockTable, tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow, branch and go, while an administrator evicts."""

    requests: Bundle[Request] = Bundle("requests")

    @initialize(capacity=st.integers(4, 12), size=st.integers(1, 3))
    def start(self, capacity: int, size: int) -> None:
        self.size = size
        self.directory = tempfile.TemporaryDirectory()
        geometry = BlockGeometry(1, 1, 1, size, "float16")
        self.region = Region.create(self.directory.name, "r", geometry, capacity, bytes(32), random.Random(0))
        self.now = 0
        self.pool = Pool.create(self.region, clock=self.clock)
        self.key_space = KeySpace(bytes(16))
        self.root = self.key_space.root(KeyRoot("m", size, "float16"))
        self.content: dict[int, History] = {}
        self.open: list[Request] = []

    def clock(self) -> int:
        """Advances every other call, so that equal times occur."""
        self.now += 1
        return self.now // 2

    def keys(self, tokens: list[int]) -> list[bytes]:
        return self.key_space.block_keys(self.root, tokens, self.size)

    def write(self, request: Request, start: int) -> None:
        """The engine writes the KV of the tokens from `start` on; each block must be the request's own."""
        for position in range(start // self.size, -(-len(request.tokens) // self.size)):
            block = request.table.blocks[position]
            others = [other for other in self.open if other is not request and block in other.table.held()]
            assert others == [], f"block {block} is written while {others} hold it"
            self.content[block] = tuple(request.tokens[: (position + 1) * self.size])

    def check_content(self, request: Request, blocks: int) -> None:
        for position in range(blocks):
            expected = tuple(request.tokens[: (position + 1) * self.size])
            assert self.content[request.table.blocks[position]] == expected

    def seal_full_blocks(self, request: Request, upto: int) -> None:
        keys = self.keys(request.tokens)
        for position in range(len(request.table.keys), min(upto, len(keys))):
            ids = request.tokens[position * self.size : (position + 1) * self.size]
            block = self.pool.seal(request.table, position, keys[position], ids)
            assert request.table.blocks[position] == block
        self.check_content(request, len(request.table.keys))

    @rule(target=requests, tokens=prompts, check_tokens=st.booleans(), sealed=st.integers(0, 12))
    def arrive(self, tokens: list[int], check_tokens: bool, sealed: int) -> Request:
        request = Request(self.pool.table(f"r{len(tokens)}"), tokens)
        keys = self.keys(tokens)
        expected = self.pool.peek(keys)
        matched = self.pool.match(request.table, keys, tokens if check_tokens else None)
        assert matched == expected
        self.check_content(request, matched)
        needed = -(-len(tokens) // self.size) - matched
        could = self.pool.available() >= needed
        before = list(request.table.blocks)
        done = self.pool.allocate(request.table, needed)
        assert done == could
        if not done:
            assert request.table.blocks == before
            self.pool.release(request.table)
            return request
        self.check_content(request, matched)  # the allocation evicted none of it
        self.open.append(request)
        self.write(request, matched * self.size)
        self.seal_full_blocks(request, sealed)
        return request

    @rule(request=requests, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, request: Request, more: list[int]) -> None:
        """Decoding: a token at a time, a block when the last one is full, sealed when full."""
        if request.table.closed or len(request.table.keys) < len(request.tokens) // self.size:
            return
        for token in more:
            if len(request.tokens) % self.size == 0 and not self.pool.allocate(request.table, 1):
                return
            request.tokens = [*request.tokens, token]
            self.write(request, len(request.tokens) - 1)
            self.seal_full_blocks(request, len(request.tokens))

    @rule(request=requests, sealed=st.integers(1, 12))
    def seal_more(self, request: Request, sealed: int) -> None:
        if not request.table.closed:
            self.seal_full_blocks(request, len(request.table.keys) + sealed)

    @rule(request=requests, token=st.integers(0, 1), finish=st.booleans())
    def rewrite_the_tail(self, request: Request, token: int, finish: bool) -> None:
        """The last token of a prompt that was found whole is computed again, or another one takes its place."""
        table = request.table
        if table.closed or len(request.tokens) != len(table.keys) * self.size or len(table.keys) != len(table.blocks):
            return
        position = len(table.keys) - 1
        before = (list(table.blocks), list(table.keys))
        pair = self.pool.copy_on_write(table, position)
        if pair is None:
            assert (table.blocks, table.keys) == before
            return
        source, target = pair
        assert source == before[0][position] != target == table.blocks[position]
        self.content[target] = self.content[source]
        if finish:
            self.pool.finish_copy(table)
        request.tokens = [*request.tokens[:-1], token]
        self.write(request, len(request.tokens) - 1)
        self.seal_full_blocks(request, len(request.tokens))

    @rule(request=consumes(requests), how=st.sampled_from(["release", "twice", "force", "close"]))
    def leave(self, request: Request, how: str) -> None:
        open_before = not request.table.closed
        if how == "force":
            self.pool.force_release(request.table, "test")
        elif how == "close":
            request.table.close()
        else:
            self.pool.release(request.table)
        if how == "twice":
            assert self.pool.release(request.table) == 0
        if open_before:
            self.open.remove(request)

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        idle = self.pool.stats().blocks["cached"]
        assert self.pool.evict(count) == min(count, idle)

    @rule()
    def reset(self) -> None:
        idle = self.pool.stats().blocks["cached"]
        assert self.pool.reset() == idle

    @precondition(lambda self: not self.open)
    @rule()
    def next_life(self) -> None:
        """The process ends and another one takes the region over: what was cached is there."""
        cached = self.pool.stats().blocks["cached"]
        self.pool.close()
        self.pool = Pool.create(self.region, clock=self.clock)
        assert self.pool.stats().blocks["cached"] == cached

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.check_integrity() == ""
        stats = self.pool.stats()
        assert sum(stats.blocks.values()) == stats.capacity_blocks
        assert stats.evicted_while_held == 0
        assert stats.hash_collisions == 0
        held = {block for request in self.open for block in request.table.held()}
        assert self.pool.held_blocks() == len(held) == stats.used_blocks

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for request in self.open:
            self.pool.release(request.table)
        assert self.pool.held_blocks() == 0
        assert self.pool.available() == self.pool.capacity_blocks
        self.pool.close()
        self.region.close()
        self.directory.cleanup()


def test_any_order_of_calls() -> None:
    logging.getLogger("kvpool.pool").disabled = True
    try:
        run_state_machine_as_test(
            PoolMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
        )
    finally:
        logging.getLogger("kvpool.pool").disabled = False
