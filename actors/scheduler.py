"""Which sequences compute which tokens in the next step, and on which blocks.

Continuous batching. Each step has a budget of tokens: first one token for every decoding sequence, then prompt chunks
of running sequences, then admissions, oldest first throughout. Admission is match (hold what is cached) then allocate
the rest, all or nothing, so nobody holds blocks while waiting for more. A decoding sequence that needs one more block
when there is none preempts the youngest running sequence: its blocks go back (what it sealed stays cached) and it waits
at its old place in the line.

Single flight: a waiting sequence whose next block is being computed by a running one is passed over until that block is
sealed, then it is a hit. A full-prompt hit computes only the last token again, into a copy of the tail block.

No torch here: block bytes are copied by a function passed in. Only the step thread calls this.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actors.sequence import Sequence
from kvpool import BlockTable, Pool

_LOOK_AHEAD = 64
"""Waiting sequences examined in a step. Bounds the step's cost when many wait for the same prefix."""


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of `sequence` from position `start`. `samples`: the step yields its next token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


def _age(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    """The waiting line and the running set."""

    def __init__(
        self,
        pool: Pool,
        copy_block: Callable[[int, int], None],
        *,
        step_tokens: int,
        max_running: int,
    ) -> None:
        self._pool = pool
        self._copy_block = copy_block
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._block_tokens = pool.geometry.block_tokens
        self._computing: dict[bytes, Sequence] = {}
        self._no_room = False
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that running and waiting sequences have yet to compute. A hint for other threads."""
        return sum(sequence.uncached for sequence in (*self.running, *self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at its place in the waiting line."""
        insort(self.waiting, sequence, key=_age)

    def plan(self) -> tuple[list[Work], list[Sequence]]:
        """The next step's work and the sequences admitted for the first time.

        Allocates every block the work writes to. Mutates tables; may preempt. An empty list means nothing can run.
        """
        work = self._decodes()
        budget = max(0, self._step_tokens - len(work))
        for sequence in self.running:
            if budget and sequence.pending > 1:
                work.append(Work(sequence, sequence.computed, min(sequence.pending, budget)))
                budget -= work[-1].count
        admitted: list[Sequence] = []
        for sequence in self._admissions(budget):
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
                self._pool.count_prefix(len(sequence.request.prompt_token_ids), sequence.computed)
                admitted.append(sequence)
            work.append(Work(sequence, sequence.computed, min(sequence.pending, budget)))
            budget -= work[-1].count
            if not budget:
                break
        return work, admitted

    def commit(self, work: list[Work], sampled: Mapping[int, int]) -> None:
        """Record a computed step: `sampled` maps an index in `work` to its new token. Seals blocks that became full."""
        for index, item in enumerate(work):
            sequence = item.sequence
            sequence.computed = item.start + item.count
            self._seal(sequence)
            if index in sampled:
                sequence.tokens.append(sampled[index])

    def finish(self, sequence: Sequence) -> None:
        """Take a running or waiting sequence out and give its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def force_out(self, sequence: Sequence, cause: str) -> None:
        """`finish` after a failure: through the pool's forced release, which raises the alarm."""
        if sequence.table is not None:
            self._pool.force_release(sequence.table, cause)
            sequence.table = None
        self.finish(sequence)

    def _decodes(self) -> list[Work]:
        work: list[Work] = []
        for sequence in list(self.running):
            # A sequence preempted for an older one in this very loop is no longer running.
            if sequence.table is None or sequence.pending != 1:
                continue
            if self._grow(sequence):
                work.append(Work(sequence, sequence.computed, 1))
        return work

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure the block of the next token exists. Preempts the youngest until it does; False if that is itself."""
        assert sequence.table is not None
        while self._missing(sequence, sequence.table):
            if self._pool.allocate(sequence.table, 1):
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _missing(self, sequence: Sequence, table: BlockTable) -> int:
        needed = -(-len(sequence.tokens) // self._block_tokens)
        return max(0, needed - len(table.blocks))

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=_age)

    def _admissions(self, budget: int) -> list[Sequence]:
        """Move waiting sequences into the running set while budget, places and blocks last."""
        admitted: list[Sequence] = []
        if self._no_room and self.running:
            # Nothing was released since the last try, which matched and let go of a whole prefix for nothing.
            return admitted
        for sequence in self.waiting[:_LOOK_AHEAD]:
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            keys = sequence.full_keys()
            matched = self._pool.peek(keys)
            if matched < len(keys) and keys[matched] in self._computing:
                continue
            if not self._take_blocks(sequence, keys):
                self._no_room = True
                break
            budget -= min(sequence.pending, budget)
            insort(self.running, sequence, key=_age)
            admitted.append(sequence)
            for key in keys[sequence.computed // self._block_tokens :]:
                self._computing.setdefault(key, sequence)
        for sequence in admitted:
            self.waiting.remove(sequence)
        return admitted

    def _take_blocks(self, sequence: Sequence, keys: list[bytes]) -> bool:
        """Match, then allocate the rest, all or nothing. Sets `table` and `computed`."""
        table = self._pool.table(sequence.request_id)
        matched = self._pool.match(table, keys, sequence.tokens)
        computed = matched * self._block_tokens
        if computed == len(sequence.tokens):
            copied = self._pool.copy_on_write(table, matched - 1)
            if copied is None:
                # No block for the copy: give up the tail, which may then be evicted for the recomputed one.
                self._pool.release(table)
                table = self._pool.table(sequence.request_id)
                matched = self._pool.match(table, keys[: matched - 1], sequence.tokens)
                computed = matched * self._block_tokens
            else:
                self._copy_block(*copied)
                self._pool.finish_copy(table)
                computed -= 1
        missing = self._missing(sequence, table)
        # One spare block for each running sequence keeps an admission from being preempted in its first steps.
        spare = len(self.running)
        if (spare and self._pool.available() < missing + spare) or (
            missing and not self._pool.allocate(table, missing)
        ):
            self._pool.release(table)
            return False
        sequence.table, sequence.computed = table, computed
        return True

    def _seal(self, sequence: Sequence) -> None:
        table = sequence.table
        assert table is not None
        keys = sequence.full_keys()
        for position in range(len(table.keys), sequence.computed // self._block_tokens):
            self._pool.seal(table, position, keys[position], sequence.block_span(position))
            self._computing.pop(keys[position], None)

    def _release(self, sequence: Sequence) -> None:
        self._no_room = False
        if sequence.table is None:
            return
        for key in sequence.keys[len(sequence.table.keys) :]:
            if self._computing.get(key) is sequence:
                del self._computing[key]
        self._pool.release(sequence.table)
        sequence.table = None
        sequence.computed = 0
