"""Single steps that a worker takes when it is told to, for interleavings that must come about exactly.

    run NAME TOKENS [SEALED]   a request of these blocks (one digit or letter a block): match, allocate, seal all or SEALED blocks
    seal NAME                  seals what is left
    check NAME                 every sealed block holds what its tokens say
    hold NAME                  remembers the blocks of the request as an engine step would
    recheck NAME               those blocks, whatever the table says now, hold what the tokens say
    release NAME               releases it
    evict N / tidy / reclaim / line N / fork
    wait                       nothing

What a step found is asserted, or noted in the journal for the test to read.
"""

from __future__ import annotations

import os
import signal

from kvpool import BlockTable, Pool
from tests.chaos.content import BLOCK_TOKENS, GEOMETRY, Tokens, block_bytes, histories, key_of
from tests.chaos.journal import Journal

_BYTES = GEOMETRY.block_bytes


def tokens_of(digits: str) -> Tokens:
    """The tokens of blocks named by digits and letters."""
    return tuple(int(digit, 36) for digit in digits for _ in range(BLOCK_TOKENS))


class Script:
    """Performs lines on `pool`."""

    def __init__(self, pool: Pool, journal: Journal) -> None:
        self._pool = pool
        self._journal = journal
        self._kv = pool.region.kv_memory
        self._requests: dict[str, tuple[BlockTable, Tokens]] = {}
        self._remembered: dict[str, list[int]] = {}

    def perform(self, line: str) -> None:
        """Performs one line."""
        verb, *rest = line.split()
        getattr(self, f"_{verb}")(*rest)

    def _run(self, name: str, digits: str, sealed: str = "") -> None:
        tokens = tokens_of(digits)
        table = self._pool.table(name)
        matched = self._pool.match(table, [key_of(history) for history in histories(tokens)])
        done = len(digits) == matched or self._pool.allocate(table, len(digits) - matched)
        self._journal.note(run=name, matched=matched, allocated=done)
        self._requests[name] = (table, tokens)
        if done:
            self._seal(name, sealed or str(len(digits)))

    def _seal(self, name: str, up_to: str = "") -> None:
        table, tokens = self._requests[name]
        for position in range(len(table.keys), int(up_to or len(table))):
            history = tokens[: (position + 1) * BLOCK_TOKENS]
            block = table.block(position)
            self._kv[block * _BYTES : (block + 1) * _BYTES] = block_bytes(history)
            self._pool.seal(table, position, key_of(history), list(history[-BLOCK_TOKENS:]))

    def _check(self, name: str) -> None:
        table, _ = self._requests[name]
        self._verify(name, table.blocks[: len(table.keys)])

    def _hold(self, name: str) -> None:
        table, _ = self._requests[name]
        self._remembered[name] = table.blocks[: len(table.keys)]

    def _recheck(self, name: str) -> None:
        self._verify(name, self._remembered[name])

    def _verify(self, name: str, blocks: list[int]) -> None:
        _, tokens = self._requests[name]
        for position, block in enumerate(blocks):
            found = bytes(self._kv[block * _BYTES : (block + 1) * _BYTES])
            expected = block_bytes(tokens[: (position + 1) * BLOCK_TOKENS])
            assert found == expected, f"block {block} at position {position} of {name} holds something else"

    def _release(self, name: str) -> None:
        self._pool.release(self._requests.pop(name)[0])

    def _evict(self, count: str) -> None:
        self._journal.note(evicted=self._pool.evict(int(count)))

    def _tidy(self) -> None:
        report = self._pool.tidy()
        self._journal.note(
            tidied=[record.pid for record in report.reclaimed],
            recounted=report.recounted,
            late_indexed=report.late_indexed,
            restored_bits=report.restored_bits,
        )

    def _reclaim(self) -> None:
        self._journal.note(reclaimed=[record.pid for record in self._pool.reclaim()])

    def _line(self, wanted: str) -> None:
        self._pool.wait_in_line(int(wanted))

    def _fork(self) -> None:
        """A child that outlives us, though not for long."""
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            while True:
                signal.pause()
        self._journal.note(forked=child)

    def _wait(self) -> None:
        """Nothing."""
