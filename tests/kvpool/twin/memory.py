"""What the processes of one region share: plain lists instead of words in shared memory.

One entry per block of every array of the layout; a free bitmap that is only a hint; the slots with their local caches,
which outlive their processes. `died` names the slots whose process is gone and whose words nobody has reclaimed yet.

Everything of one process that dies with it (which request holds what) is not here but in `hands.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tests.kvpool.twin.index import WindowIndex
from tests.kvpool.twin.words import State, Word

NO_PARENT: Final = -1
LOCAL_CACHE_BLOCKS: Final = 4


@dataclass(slots=True)
class Block:
    """The words of one block. `holders` and `children` count only while it is INDEXED (or about to leave).

    `private`: its key was taken by other tokens or another parent, so it stays out of the index for good.
    """

    word: Word = field(default_factory=Word)
    holders: set[int] = field(default_factory=set)
    last_use: int = 0
    children: int = 0
    parent: int = NO_PARENT
    depth: int = 0
    filled: int = 0
    private: bool = False
    label: str = ""
    key: bytes = b""
    tokens: tuple[int, ...] = ()

    @property
    def state(self) -> State:
        """The state in its word."""
        return self.word.state

    @property
    def idle(self) -> bool:
        """Whether it is cached: indexed, and nobody holds it."""
        return self.state is State.INDEXED and not self.holders


@dataclass(slots=True)
class Memory:
    """One region. `free_bits` and `dirty_bits` are the bitmaps; `local` the caches by slot, taken slots only.

    `recount`: child counts may be too high, because a process died between un-indexing and counting down.
    `prefer`: keys of leaves that go first where the order is free; a test sets it so that the twin goes the way of the
    pool it is compared with. Free is the order of leaves of equal age and depth; without `exact_order`, of all leaves.
    """

    capacity: int
    block_tokens: int
    blocks: list[Block] = field(init=False)
    index: WindowIndex = field(init=False)
    free_bits: set[int] = field(init=False)
    dirty_bits: set[int] = field(default_factory=set)
    local: dict[int, list[int]] = field(default_factory=dict)
    died: set[int] = field(default_factory=set)
    recount: bool = False
    prefer: frozenset[bytes] = frozenset()
    exact_order: bool = True

    def __post_init__(self) -> None:
        self.blocks = [Block() for _ in range(self.capacity)]
        self.free_bits = set(range(self.capacity))
        self.index = WindowIndex(1 << (2 * self.capacity - 1).bit_length(), lambda block: self.blocks[block].key)

    def numbers(self, *states: State) -> list[int]:
        """Returns the blocks that are in one of `states`, ascending."""
        return [number for number, block in enumerate(self.blocks) if block.state in states]

    def free(self, number: int) -> None:
        """Ends the block's life: FREE first, then the hint."""
        block = self.blocks[number]
        block.word = block.word.to(State.FREE)
        self.free_bits.add(number)

    def counts(self) -> dict[str, int]:
        """Returns the number of blocks by condition; they sum to the capacity."""
        held = sum(block.state is State.INDEXED and bool(block.holders) for block in self.blocks)
        number = {state: len(self.numbers(state)) for state in State}
        leaving = number[State.EVICTING] + number[State.FREEING]
        return {
            "free": number[State.FREE],
            "local": number[State.LOCAL],
            "mutable": number[State.MUTABLE],
            "sealed": number[State.SEALED],
            "held": held,
            "cached": number[State.INDEXED] - held + leaving,
        }
