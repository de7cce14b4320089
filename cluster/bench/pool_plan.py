"""What one run of the pool benchmark does, in numbers. Imports nothing heavy, so that the command line can ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAIR_BLOCKS: Final = 16
"""Blocks that a request of a pair takes."""
MATCH_BLOCKS: Final = 1_000
"""Blocks of the prompt that is matched."""
HELD_BLOCKS: Final = 10_000
"""Blocks that a process holds when it is killed."""
LEAST_BLOCKS: Final = HELD_BLOCKS + 64
"""A region has at least so many: room for those and for the neighbours' local caches."""
MOST_BLOCKS: Final = 1 << 22


@dataclass(frozen=True)
class Plan:
    """`seconds` for each phase of each of `rounds` rounds, over a region of `capacity_blocks` (>= LEAST_BLOCKS).

    `startup_blocks` is the size of the region whose start is timed: about 1.5 GB of the demo model's blocks.
    """

    seconds: float = 0.5
    rounds: int = 9
    capacity_blocks: int = 16_384
    startup_blocks: int = 4096
