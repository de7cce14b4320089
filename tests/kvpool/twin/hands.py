"""One process's hands on the blocks: taking, holding, letting go.

`refs` says how many requests of THIS process hold a block. The region knows less: the owner in the state word of a
block that is not indexed, one bit per process in the holder word of one that is.

Taking goes: local cache, then free blocks by their bits (a bit whose block is not FREE is cleared and passed over;
bits that are missing are found from the states when the bitmap runs dry). Free blocks are taken from the TOP, so that
a test which compares with the real pool cannot lean on block numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.kvpool.twin.memory import LOCAL_CACHE_BLOCKS, Memory
from tests.kvpool.twin.words import State


class Hands:
    """Blocks of `memory`, mutated on behalf of process slot `slot`."""

    def __init__(self, memory: Memory, slot: int) -> None:
        self.memory = memory
        self.slot = slot
        self.refs: Counter[int] = Counter()
        self.counters: Counter[str] = Counter()

    @property
    def local(self) -> list[int]:
        """The local cache; it lies in the region."""
        return self.memory.local[self.slot]

    def owns(self, number: int) -> bool:
        """Whether the block is MUTABLE, ours, and held by exactly one request."""
        word = self.memory.blocks[number].word
        return word.state is State.MUTABLE and word.owner == self.slot and self.refs[number] == 1

    def takeable(self) -> int:
        """Returns how many blocks can be taken without evicting."""
        return len(self.local) + len(self.memory.numbers(State.FREE))

    def take(self, count: int, label: str) -> list[int]:
        """Returns `count` blocks, now MUTABLE, ours, held once. There must be that many to take."""
        taken = [self.local.pop() for _ in range(min(count, len(self.local)))]
        taken += self._claim(count - len(taken))
        assert len(taken) == count, f"{count} blocks were there to take but only {len(taken)} were found"
        for number in taken:
            block = self.memory.blocks[number]
            assert not block.holders, f"block {number} is taken while slots {block.holders} hold it"
            assert self.refs[number] == 0, f"block {number} is taken while a request holds it"
            block.word = block.word.to(State.MUTABLE, self.slot)
            block.filled, block.label = 0, label
            self.refs[number] = 1
        return taken

    def _claim(self, count: int) -> list[int]:
        memory = self.memory
        found: list[int] = []
        if count > sum(memory.blocks[number].state is State.FREE for number in memory.free_bits):
            memory.free_bits |= set(memory.numbers(State.FREE))
        for number in sorted(memory.free_bits, reverse=True):
            if len(found) == count:
                break
            memory.free_bits.discard(number)
            if memory.blocks[number].state is State.FREE:
                found.append(number)
        return found

    def hold(self, number: int) -> None:
        """One more request of this process holds the block; the first one sets the process's bit."""
        self.refs[number] += 1
        if self.refs[number] == 1:
            self.memory.blocks[number].holders.add(self.slot)

    def drop(self, numbers: Iterable[int], now_ns: int) -> None:
        """For each block one request lets go. The last one makes an indexed block idle and gives others back."""
        for number in numbers:
            self.refs[number] -= 1
            assert self.refs[number] >= 0, f"block {number} is given back more often than it was held"
            if self.refs[number]:
                continue
            block = self.memory.blocks[number]
            if block.state not in (State.MUTABLE, State.SEALED):
                block.last_use = now_ns
                block.holders.remove(self.slot)
            elif len(self.local) < LOCAL_CACHE_BLOCKS:
                block.word = block.word.to(State.LOCAL, self.slot)
                self.local.append(number)
            else:
                self.memory.free(number)

    def flush_local(self) -> None:
        """Empties the local cache."""
        while self.local:
            self.memory.free(self.local.pop())
