"""The two products of a chunk's attention on vectors (`pair_sums.py`), for CPUs without matrix tiles.

K and V of a strip are widened to float32 first, where a thread has room for one of both: that is little beside the products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.chunk_softmax import SCORE_BYTES, WEIGHT_BYTES
from actors.fused_kernels import BLOCK_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, POOL, first_of
from actors.lanes import fill, load_narrow, narrow, store
from actors.pair_sums import ROWS, pair_sums
from kvpool.compiled import inner
from kvpool.kernels.atomics import get

_LINE = 64
_sums = pair_sums(ROWS)


@inner
def _widened(layer: int, blocks: Any, start: int, keys: int, what: int, room: Any) -> None:
    """Rows of `what` (see `first_of`) from position `start` into `room` [keys, head_dim]; one of zeros behind an odd number."""
    block_tokens, head_dim = get(layer + BLOCK_TOKENS), get(layer + HEAD_DIM)
    block_size = get(layer + LAYERS) * 2 * get(layer + KV_HEADS) * block_tokens * head_dim
    pool, first = narrow(get(layer + POOL)), first_of(layer, what)
    for key in range(0, keys, 16):
        block, offset = blocks[(start + key) // block_tokens], (start + key) % block_tokens
        at = block * block_size + first + offset * head_dim
        for d in range(0, min(16, keys - key) * head_dim, 16):
            store(room, key * head_dim + d, load_narrow(pool, at + d))
    for d in range(keys * head_dim, (keys + keys % 2) * head_dim, 16):
        store(room, d, fill(np.float32(0.0)))


@inner
def score(
    scores_at: int, layer: int, blocks: Any, start: int, keys: int, kv_head: int, asked_at: int, both: int, room: Any
) -> None:
    """Scores of keys from position `start`; what is behind the last is no matter."""
    head_dim = get(layer + HEAD_DIM)
    _widened(layer, blocks, start, keys, kv_head, room)
    for which in range(both):
        asked, scores = asked_at + which * 32 * head_dim, scores_at + which * SCORE_BYTES
        for key in range(0, keys, ROWS):
            keys_at = room.ctypes.data + 4 * key * head_dim
            _sums(keys_at, 4 * head_dim, 4, asked, _LINE, head_dim // 2, scores + _LINE * key, _LINE, 0)


@inner
def mix(
    sums_at: int,
    layer: int,
    blocks: Any,
    start: int,
    keys: int,
    kv_head: int,
    weights_at: int,
    both: int,
    room: Any,
    laid_at: int,
    laid_from: int,
    laid_tiles: int,
) -> None:
    """Add what the values of keys from position `start` come to."""
    head_dim = get(layer + HEAD_DIM)
    _widened(layer, blocks, start, keys, get(layer + KV_HEADS) + kv_head, room)
    for which in range(both):
        weights, sums = weights_at + which * WEIGHT_BYTES, sums_at + which * _LINE * head_dim
        for d in range(0, head_dim, ROWS):
            at = room.ctypes.data + 4 * d
            _sums(at, 4, 4 * head_dim, weights, _LINE, (keys + 1) // 2, sums + _LINE * d, _LINE, 1)
