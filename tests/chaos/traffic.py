"""One worker's random requests on a pool that is too small for all of them.

Whatever comes is verified: the bytes of every block that is matched, every block that is held, again and again, in the list
that was current when the look began, as an engine step would read them. A block that is being filled holds the worker's own
random bytes until it is sealed, and must still hold them then. Whatever differs raises AssertionError.

Sources of randomness and time are given; which interleavings come about is up to the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool import BlockTable, Pool, Reclaimed
from tests.chaos.content import (
    BLOCK_TOKENS,
    GEOMETRY,
    LONGEST_BLOCKS,
    Tokens,
    block_bytes,
    histories,
    key_of,
    random_block,
    random_prompt,
)
from tests.chaos.stopwatch import Stopwatch

_MOST_OPEN = 4
_BYTES = GEOMETRY.block_bytes
_TRIES_IN_LINE = 30


@dataclass
class Request:
    """An open request: its table, its tokens, and the bytes written into blocks that are not sealed yet."""

    table: BlockTable
    tokens: Tokens
    drafts: dict[int, bytes] = field(default_factory=dict)


class Traffic:
    """Random operations on `pool`. `count` says how many calls of `step` were made. `meddles`: it also tidies and reclaims
    by itself, all the time, beside the tidy threads.
    """

    def __init__(
        self,
        pool: Pool,
        rng: random.Random,
        name: str,
        call: Stopwatch,
        reclaimed: Callable[[list[Reclaimed]], None],
        meddles: bool,
    ) -> None:
        self._pool = pool
        self._rng = rng
        self._name = name
        self._call = call
        self._reclaimed = reclaimed
        self._meddles = meddles
        self._kv = pool.region.kv_memory
        self._open: list[Request] = []
        self.count = 0
        self.did = ""

    def step(self) -> None:
        """One random operation."""
        self.count += 1
        draw = self._rng.random()
        full = len(self._open) >= _MOST_OPEN
        if self._open and (full or draw < 0.15):
            self._do("leave", self._leave)
        elif not self._open or draw < 0.55:
            self._do("arrive", self._arrive)
        elif draw < 0.67:
            self._do("grow", self._grow)
        elif draw < 0.77:
            self._do("rewrite", self._rewrite)
        elif draw < 0.92:
            self._do("look", self._look)
        else:
            self._do("tend", self._tend)
        if self._call(self._pool.demand) and self._open:
            self._do("yield", lambda: self._give_up(self._open.pop()))

    def finish(self) -> None:
        """Verifies and releases everything."""
        while self._open:
            self._leave()
        self._call(self._pool.leave_line)

    def _do(self, what: str, operation: Callable[[], None]) -> None:
        self.did = what
        operation()

    # Operations

    def _arrive(self) -> None:
        tokens = random_prompt(self._rng)
        request = self._begin(tokens)
        if not self._room(request):
            self._give_up(request)
            served = self._wait(tokens)
            if served is None:
                return
            request = served
        self._fill(request)
        self._seal(request, self._rng.choice((len(tokens), len(tokens), self._rng.randrange(len(tokens)))))
        self._open.append(request)

    def _begin(self, tokens: Tokens) -> Request:
        table = self._pool.table(f"{self._name}.{self.count}")
        keys = [key_of(history) for history in histories(tokens)]
        compared = list(tokens) if self._rng.random() < 0.5 else None
        matched = self._call(self._pool.match, table, keys, compared)
        assert matched <= len(keys), f"matched {matched} of {len(keys)}"
        request = Request(table, tokens)
        self._verify(request)
        return request

    def _room(self, request: Request) -> bool:
        wanted = len(request.tokens) // BLOCK_TOKENS - len(request.table)
        if wanted and not self._call(self._pool.allocate, request.table, wanted):
            return False
        for block in request.table.blocks[len(request.table) - wanted :]:
            self._draft(request, block)
        return True

    def _wait(self, tokens: Tokens) -> Request | None:
        """Waits in line, holding nothing for the request; None when it takes too long, or it is not worth it."""
        if self._rng.random() < 0.4:
            return None
        self._call(self._pool.wait_in_line, len(tokens) // BLOCK_TOKENS)
        try:
            for _ in range(_TRIES_IN_LINE):
                if self._open:
                    self._leave()
                request = self._begin(tokens)
                if self._room(request):
                    return request
                self._give_up(request)
                time.sleep(0.001)
            return None
        finally:
            self._call(self._pool.leave_line)

    def _fill(self, request: Request) -> None:
        """Time goes by while the blocks are computed; nobody else may have written to them."""
        if self._rng.random() < 0.1:
            time.sleep(self._rng.random() * 0.003)
        self._verify(request)

    def _seal(self, request: Request, tokens: int) -> None:
        """Completes the blocks up to the one in which token number `tokens` is."""
        table = request.table
        for position in range(len(table.keys), tokens // BLOCK_TOKENS):
            block = table.block(position)
            history = request.tokens[: (position + 1) * BLOCK_TOKENS]
            assert self._read(block) == request.drafts.pop(block), f"block {block} changed before it was sealed"
            self._write(block, block_bytes(history))
            now = self._call(self._pool.seal, table, position, key_of(history), list(history[-BLOCK_TOKENS:]))
            assert self._read(now) == block_bytes(history), f"block {now} has other bytes than {block}, now sealed"

    def _look(self) -> None:
        self._verify(self._rng.choice(self._open))

    def _grow(self) -> None:
        request = self._rng.choice(self._open)
        depth = len(request.table)
        if depth >= LONGEST_BLOCKS + 4 or len(request.table.keys) < depth:
            self._seal(request, len(request.tokens))
            return
        if not self._call(self._pool.allocate, request.table, 1):
            self._open.remove(request)
            self._give_up(request)
            return
        request.tokens += random_block(self._rng, depth)
        self._draft(request, request.table.block(depth))
        self._fill(request)
        self._seal(request, len(request.tokens))

    def _rewrite(self) -> None:
        """Another end for a request that shares its last block."""
        request = self._rng.choice(self._open)
        table = request.table
        position = len(table.keys) - 1
        if position < 0 or len(table) > position + 1:
            return
        pair = self._call(self._pool.copy_on_write, table, position)
        if pair is None:
            return
        source, target = pair
        expected = block_bytes(request.tokens)
        assert source != target, f"block {source} was sealed, but is ours to write"
        assert self._read(source) == expected, f"block {source} changed while it was held for a copy"
        self._write(target, self._read(source))
        request.drafts[target] = expected
        if self._rng.random() < 0.7:
            self._call(self._pool.finish_copy, table)
        request.tokens = request.tokens[:-BLOCK_TOKENS] + random_block(self._rng, position)
        self._fill(request)
        self._seal(request, len(request.tokens))

    def _leave(self) -> None:
        request = self._open.pop(self._rng.randrange(len(self._open)))
        self._verify(request)
        self._call(self._pool.release, request.table)
        if self._rng.random() < 0.05:
            self._call(self._pool.release, request.table)

    def _give_up(self, request: Request) -> None:
        self._verify(request)
        self._call(self._pool.give_up, request.table)

    def _tend(self) -> None:
        what = self._rng.randrange(6 if self._meddles else 4)
        if what == 0:
            self._call(self._pool.evict, self._rng.randint(1, 3))
        elif what == 4:
            self._reclaimed(list(self._call(self._pool.tidy).reclaimed))
        elif what == 5:
            self._reclaimed(self._call(self._pool.reclaim))
        elif what == 1:
            blocks = self._call(self._pool.stats).blocks
            assert sum(blocks.values()) == self._pool.capacity_blocks, blocks
        elif what == 2:
            available = self._call(self._pool.available)
            assert 0 <= available <= self._pool.capacity_blocks + 4, available
        else:
            keys = [key_of(history) for history in histories(random_prompt(self._rng))]
            assert self._call(self._pool.peek, keys) <= len(keys)

    # Bytes

    def _read(self, block: int) -> bytes:
        return bytes(self._kv[block * _BYTES : (block + 1) * _BYTES])

    def _write(self, block: int, data: bytes) -> None:
        self._kv[block * _BYTES : (block + 1) * _BYTES] = data

    def _draft(self, request: Request, block: int) -> None:
        request.drafts[block] = self._rng.randbytes(_BYTES)
        self._write(block, request.drafts[block])

    def _verify(self, request: Request) -> None:
        sealed = len(request.table.keys)
        for position, block in enumerate(request.table.blocks):
            history = request.tokens[: (position + 1) * BLOCK_TOKENS]
            expected = block_bytes(history) if position < sealed else request.drafts.get(block)
            if expected is not None:
                found = self._read(block)
                assert found == expected, (
                    f"position {position} of {request.table.request_id}, block {block}, "
                    f"{'sealed' if position < sealed else 'being filled'}, does not hold what was written"
                )
