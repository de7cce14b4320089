"""What the blocks of the chaos tests hold: bytes that follow from all tokens up to the block's end, and from nothing else.

So a block that was shared wrongly, given out twice, or freed too early holds bytes that its reader does not expect. The
vocabulary is tiny: two or three different blocks at each place, so prompts share prefixes all the time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from kvpool import BlockGeometry, KeyRoot, KeySpace

BLOCK_TOKENS: Final = 4
GEOMETRY: Final = BlockGeometry(1, 1, 8, BLOCK_TOKENS, "float32")
FINGERPRINT: Final = bytes(range(32))
LONGEST_BLOCKS: Final = 12
_SPACE: Final = KeySpace(b"chaos-chaos-chaos-chaos-chaos!!!")
_ROOT: Final = _SPACE.root(KeyRoot("chaos", BLOCK_TOKENS, "float32"))

Tokens = tuple[int, ...]


@lru_cache(maxsize=65536)
def block_bytes(history: Tokens) -> bytes:
    """What the block that ends `history` must hold, all of it."""
    digest = blake2b(repr(history).encode(), digest_size=64).digest()
    return digest * (GEOMETRY.block_bytes // len(digest))


@lru_cache(maxsize=65536)
def key_of(history: Tokens) -> bytes:
    """The key of the full block that ends `history`."""
    if len(history) == BLOCK_TOKENS:
        return _SPACE.extend(_ROOT, history)
    return _SPACE.extend(key_of(history[:-BLOCK_TOKENS]), history[-BLOCK_TOKENS:])


def histories(tokens: Sequence[int]) -> list[Tokens]:
    """The tokens up to the end of each full block."""
    whole = tuple(tokens)
    return [whole[:end] for end in range(BLOCK_TOKENS, len(whole) + 1, BLOCK_TOKENS)]


def random_block(rng: random.Random, depth: int) -> Tokens:
    """One of the two or three blocks that may follow at this depth; rarely one that nobody else will have."""
    if rng.random() < 0.05:
        return tuple(rng.randrange(100, 1 << 30) for _ in range(BLOCK_TOKENS))
    return (rng.randrange(2 if depth < 2 else 3),) * BLOCK_TOKENS


def random_prompt(rng: random.Random) -> Tokens:
    """A prompt of whole blocks, most of them short."""
    blocks = min(rng.randint(1, LONGEST_BLOCKS), rng.randint(1, LONGEST_BLOCKS))
    tokens: Tokens = ()
    for depth in range(blocks):
        tokens += random_block(rng, depth)
    return tokens
