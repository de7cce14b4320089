"""Which sequences compute which tokens in the next step, and on which blocks.

Continuous batching. Each step has a budget of tokens: first one token for every decoding sequence, then prompt chunks
of running sequences, then admissions, the oldest first throughout. Admission is match (hold what is cached) then allocate
the rest, all or nothing, so nobody holds blocks while waiting for more. A decoding sequence that needs one more block
when there is none preempts the youngest running sequence: its blocks go back (what it sealed stays cached) and it waits
at its old place in the line.

Who is older goes by priority first (the lower), then by arrival. Nobody who runs makes room for one of a lower priority that
waits. Nothing ages: as long as enough requests of lower priorities come, one of a higher priority waits for ever.

Other processes may use the same pool. `Pool.demand` says what those that wait there need of us: the youngest running
sequences are preempted for it, and nobody is admitted in that step. A sequence that there is no room for waits in the
pool's line, holding nothing, and says how many blocks have to be free for it. Once admitted it keeps its place, asking
for the one block by which it grows next, until it ends: a process has the oldest place only until one request of it is
done, and with it nobody asks for its blocks, so processes cannot drive out each other's work for ever. (If the place
ended with the admission, whoever was preempted for it would be next to ask, and the two would swap step after step.)
Nobody gets in line for room that only our own running sequences could give.

Single flight: a waiting sequence whose next block is being computed by a running one is passed over until that block is
sealed, then it is a hit. A full-prompt hit computes only the last token again, into a copy of the tail block.

A sequence that has its logits and waits for its constraint has nothing to compute: it keeps its blocks and its place among the
running, and no step contains it.

Block bytes are copied by a function passed in. Only the step thread calls this.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from actors.sequence import Sequence
from kvpool import BlockTable, Pool

_LOOK_AHEAD = 64
"""Waiting sequences examined in a step. Bounds the step's cost when many wait for the same prefix."""
_RETRY_PLANS = 16
"""A sequence without room is tried again after so many plans at the latest, whatever the pool's free count says."""


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of `sequence` from position `start`. `samples`: the step yields its next token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


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
        self._blocked: Sequence | None = None  # the waiting sequence that there was no room for at the last try
        self._wanted = 0  # blocks that have to be free for it
        self._room = 0  # what was free when we last looked
        self._plans_since_try = 0
        self._released = False  # by us, since the last try
        self._in_line = False
        self._favoured: Sequence | None = None  # running, and keeps its place in the pool's line until it ends
        self.room_moved = False
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that running and waiting sequences have yet to compute. A hint for other threads."""
        return sum(sequence.uncached for sequence in (*self.running, *self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at its place in the waiting line."""
        if self._blocked is not None and _age(sequence) < _age(self._blocked):
            self._released = True  # there may be room for this one
        insort(self.waiting, sequence, key=_age)

    def plan(self) -> tuple[list[Work], list[Sequence]]:
        """The next step's work and the sequences admitted for the first time.

        Allocates every block the work writes to. Mutates tables; may preempt. An empty list means nothing can run;
        `room_moved` then tells whether the free blocks of the pool changed, which means that others use it and go on.
        """
        self.room_moved = False
        asked = self._give_way()
        work = self._decodes()
        budget = max(0, self._step_tokens - len(work))
        for sequence in self.running:
            if budget and sequence.pending > 1:
                work.append(Work(sequence, sequence.computed, min(sequence.pending, budget)))
                budget -= work[-1].count
        admitted: list[Sequence] = []
        for sequence in [] if asked else self._admissions(budget):
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
        """Take a running or waiting sequence out and give its blocks back, and its place in the pool's line."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)
        if sequence is self._blocked:
            self._blocked = None
        if sequence is self._favoured:
            self._favoured = None
            self._leave_line()
        if not self.waiting and self._favoured is None:
            self._leave_line()

    def force_out(self, sequence: Sequence, cause: str) -> None:
        """`finish` after a failure: through the pool's forced release, which raises the alarm."""
        self._release(sequence, lambda table: self._pool.force_release(table, cause))
        self.finish(sequence)

    def _give_way(self) -> bool:
        """Preempt the youngest for those who wait elsewhere and came before us. True if anybody does."""
        if not self._pool.demand():
            return False
        while self.running and self._pool.demand():
            self._preempt(self.running[-1])
        self._look()
        if not self._in_line and (first := next(self._candidates(), None)):
            # Without a place, those who come later would be served before us again and again.
            sequence, keys = first
            table = self._open_table(sequence)
            self._match(table, keys, sequence)
            self._wait_for(sequence, self._let_go(sequence, table))
        return True

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
        return max(0, needed - len(table))

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence, self._pool.give_up)
        if sequence is self._favoured:
            self._favoured, self._blocked = None, sequence  # the place is kept: it waits there again
        insort(self.waiting, sequence, key=_age)

    def _candidates(self) -> Iterator[tuple[Sequence, list[bytes]]]:
        """Waiting sequences, oldest first, whose next block no running one computes; with their keys. Lazy."""
        for sequence in self.waiting[:_LOOK_AHEAD]:
            keys = sequence.full_keys()
            matched = self._pool.peek(keys)
            if matched == len(keys) or keys[matched] not in self._computing:
                yield sequence, keys

    def _admissions(self, budget: int) -> list[Sequence]:
        """Move waiting sequences into the running set while budget, places and blocks last."""
        admitted: list[Sequence] = []
        if budget <= 0 or not self._worth_trying():
            return admitted
        first_in_line, self._blocked, self._released = self._blocked, None, False
        candidates = self._candidates()
        while budget > 0 and len(self.running) < self._max_running and (candidate := next(candidates, None)):
            sequence, keys = candidate
            wanted = self._take_blocks(sequence, keys)
            if wanted:
                self._wait_for(sequence, wanted)
                break
            if sequence is first_in_line and self._in_line and self._favoured is None:
                self._favoured = sequence
                self._pool.wait_in_line(1)
            budget -= min(sequence.pending, budget)
            insort(self.running, sequence, key=_age)
            admitted.append(sequence)
            for key in keys[sequence.computed // self._block_tokens :]:
                self._computing.setdefault(key, sequence)
        for sequence in admitted:
            self.waiting.remove(sequence)
        if self._blocked is None and self._favoured is None:
            self._leave_line()
        return admitted

    def _worth_trying(self) -> bool:
        """Whether to look for room: a try without success matches a whole prefix and lets go of it for nothing."""
        if self._blocked is None or self._released or not self.running:
            return True
        self._plans_since_try += 1
        # Enough may be free all the time and owed to others, so only a change tells.
        return (self._look() and self._room >= self._wanted) or self._plans_since_try >= _RETRY_PLANS

    def _look(self) -> bool:
        """Whether the number of free blocks is another one than at the last look."""
        room = self._pool.available()
        moved = room != self._room
        self._room = room
        self.room_moved |= moved
        return moved

    def _wait_for(self, sequence: Sequence, wanted: int) -> None:
        """`sequence` finds no room until `wanted` blocks are free: get in line, or say anew what is wanted there."""
        self._blocked, self._wanted, self._plans_since_try = sequence, wanted, 0
        self._look()
        if self._favoured is not None:
            return  # the place is that one's; a process has only one
        if wanted + self._pool.held_blocks() > self._pool.capacity_blocks:
            self._leave_line()
        else:
            self._pool.wait_in_line(wanted)
            self._in_line = True

    def _leave_line(self) -> None:
        if self._in_line:
            self._in_line = False
            self._pool.leave_line()

    def _match(self, table: BlockTable, keys: list[bytes], sequence: Sequence) -> int:
        return self._pool.match(table, keys, sequence.tokens if self._pool.guard else None)

    def _take_blocks(self, sequence: Sequence, keys: list[bytes]) -> int:
        """Match, then allocate the rest, all or nothing. Sets `table` and `computed` and returns 0; or, with nothing
        held, how many blocks have to be free for it.
        """
        table = self._open_table(sequence)
        matched = self._match(table, keys, sequence)
        computed = matched * self._block_tokens
        if computed == len(sequence.tokens):
            copied = self._pool.copy_on_write(table, matched - 1)
            if copied is None:
                # No block for the copy: give up the tail, which may then be evicted for the recomputed one.
                self._pool.release(table)
                table = self._open_table(sequence)
                matched = self._match(table, keys[: matched - 1], sequence)
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
            return self._let_go(sequence, table)
        sequence.computed = computed
        return 0

    def _open_table(self, sequence: Sequence) -> BlockTable:
        """An empty table, the sequence's from the start: whatever fails from here on, `force_out` gives its blocks back."""
        sequence.table = self._pool.table(sequence.request_id)
        return sequence.table

    def _let_go(self, sequence: Sequence, table: BlockTable) -> int:
        """Release the matched `table` of a sequence without room; how many blocks have to be free for it.

        What it missed, what it matched that nobody else holds (cached blocks count as free until they are matched
        again, and may be gone by then), and the spare ones. At least 1.
        """
        missing, room = self._missing(sequence, table), self._pool.available()
        self._pool.release(table)
        sequence.table = None
        unheld = max(0, self._pool.available() - room)
        needed = -(-len(sequence.tokens) // self._block_tokens)
        return max(1, min(needed, missing + unheld) + len(self.running))

    def _seal(self, sequence: Sequence) -> None:
        table = sequence.table
        assert table is not None
        keys = sequence.full_keys()
        for position in range(len(table.keys), sequence.computed // self._block_tokens):
            self._pool.seal(table, position, keys[position], sequence.block_span(position))
            self._computing.pop(keys[position], None)

    def _release(self, sequence: Sequence, give_back: Callable[[BlockTable], int] | None = None) -> None:
        self._released = True
        if sequence.table is None:
            return
        for key in sequence.keys[len(sequence.table.keys) :]:
            if self._computing.get(key) is sequence:
                del self._computing[key]
        (give_back or self._pool.release)(sequence.table)
        sequence.table = None
        sequence.computed = 0
        sequence.logits = None
