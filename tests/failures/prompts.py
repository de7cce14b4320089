"""What all processes of a scenario know: the prompts, by number, with their keys; the pools' shape; what is in a region.

Prompts of one family begin with the same blocks. Together they have more blocks than a pool, so pools evict all the time.
"""

from __future__ import annotations

import random
from typing import Final

from kvpool import BlockGeometry, KeyRoot, KeySpace, layout, words
from kvpool.region_view import RegionView

BLOCK_TOKENS: Final = 16
GEOMETRY: Final = BlockGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=BLOCK_TOKENS, dtype="float32")
FINGERPRINT: Final = bytes(layout.FINGERPRINT_BYTES)
OWNER: Final = bytes(layout.OWNER_BYTES)
PROMPTS: Final = 96
_FAMILIES: Final = 8
_HEAD_BLOCKS: Final = 2
_MOST_TAIL_BLOCKS: Final = 6

_SPACE = KeySpace(b"0123456789abcdef" * 2)
_ROOT = _SPACE.root(KeyRoot("model", BLOCK_TOKENS, "float32"))


def _tokens(number: int) -> list[int]:
    head, tail = random.Random(f"family {number % _FAMILIES}"), random.Random(f"prompt {number}")
    blocks = tail.randint(1, _MOST_TAIL_BLOCKS)
    return [head.randrange(1000) for _ in range(_HEAD_BLOCKS * BLOCK_TOKENS)] + [
        tail.randrange(1000) for _ in range(blocks * BLOCK_TOKENS)
    ]


TOKENS: Final = [_tokens(number) for number in range(PROMPTS)]
KEYS: Final = [_SPACE.block_keys(_ROOT, tokens, BLOCK_TOKENS) for tokens in TOKENS]


def indexed(view: RegionView) -> set[bytes]:
    """The keys that can be found in a region now: the truth."""
    control = view.control
    found = set()
    for block, word in enumerate(control.state):
        if words.state_of(word) == words.INDEXED:
            key = control.key(block)
            if control.state[block] == word:  # else it became another block while its key was read
                found.add(key)
    return found
