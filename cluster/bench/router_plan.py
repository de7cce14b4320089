"""What one run of the router benchmark does, in numbers. Imports nothing heavy, so that the command line can ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 16
PROMPT_BLOCKS: Final = 1_000
"""Blocks of every prompt that is asked about: 16,000 tokens."""
DEPTHS: Final = 24
"""Different depths to which pools hold a prompt."""
HOLDERS: Final = 32
"""Pools that hold a prompt, each to one of those depths."""
BATCH_BLOCKS: Final = 512
LEAST_ENTRIES: Final = 100 * PROMPT_BLOCKS
MOST_ENTRIES: Final = 1 << 24


@dataclass(frozen=True)
class Plan:
    """`entries` keys in prompts of PROMPT_BLOCKS, in `pools` pools; measured in `rounds` rounds of short phases.

    Each prompt is looked up once. Each round applies `batches`, makes `decisions` among `pools` replicas, a tenth of them among
    `many_pools`, and names and routes `prompts` from their token ids. `beyond_cache`: fill the table with other keys until it is
    larger than the machine's last-level cache. `blind_keys` are in the snapshot of a pool that a new mirror reads;
    `visible_s` is how long blocks are sealed, `batches_per_s` each second.
    """

    entries: int = 1_000_000
    rounds: int = 10
    pools: int = 64
    many_pools: int = 1024
    batches: int = 100
    decisions: int = 200
    prompts: int = 10
    flights: int = 8
    """Requests in flight at each replica while decisions are made."""
    beyond_cache: bool = True
    redis: bool = True
    batches_per_s: float = 200.0
    visible_s: float = 10.0
    blind_keys: int = 100_000
    seed: int = 1
