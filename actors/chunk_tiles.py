"""The two products of a chunk's attention on matrix tiles (`tiles.py`). K fits them as it lies in the pool, V is laid out."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray

from actors import tiles
from actors.chunk_softmax import KEYS, SCORE_BYTES, WEIGHT_BYTES
from actors.fused_kernels import BLOCK_TOKENS, HEAD_DIM, KV_HEADS, LAYERS, POOL, first_of
from actors.lanes import fill, load, load_narrow, narrow, store, store_narrow, transpose, whole_at
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get

_FAR: Final = 1 << 40


@thread_entry
def lay_values(record: int) -> None:
    """Values of positions [first, end) as tiles; zeros where a tile goes on behind the end.

    Words: record of the layer; address of the block table, int64; first, a multiple of `STRIP`; end; and the address of the
    tiles, bfloat16 [kv_heads, tiles, head_dim, 32].
    """
    layer, first, end = get(record + 8), get(record + 24), get(record + 32)
    blocks = carray(whole_at(get(record + 16)), (_FAR,))
    target, pool = narrow(get(record + 40)), narrow(get(layer + POOL))
    kv_heads, head_dim = get(layer + KV_HEADS), get(layer + HEAD_DIM)
    block_tokens = get(layer + BLOCK_TOKENS)
    block_size = get(layer + LAYERS) * 2 * kv_heads * block_tokens * head_dim
    count = (end - first + KEYS - 1) // KEYS
    square = np.empty(16 * 16, np.float32)
    zero = fill(np.float32(0.0))
    while True:
        task = fetch_add(record, 1)
        if task >= kv_heads * count:
            break
        head, start = kv_heads + task // count, first + KEYS * (task % count)
        for half in range(0, KEYS, 16):
            tokens = min(16, end - start - half)
            at = 0
            if tokens > 0:
                block, offset = blocks[(start + half) // block_tokens], (start + half) % block_tokens
                at = block * block_size + first_of(layer, head) + offset * head_dim
            for d in range(0, head_dim, 16):
                for row in range(16):
                    store(square, 16 * row, load_narrow(pool, at + row * head_dim + d) if row < tokens else zero)
                transpose(square, 0)
                for row in range(16):
                    store_narrow(target, (task * head_dim + d + row) * KEYS + half, load(square, 16 * row))


@inner
def score(
    scores_at: int, layer: int, blocks: Any, start: int, keys: int, kv_head: int, asked_at: int, both: int, room: Any
) -> None:
    """Scores of keys from position `start`, in pairs of 16; what is behind the last is no matter."""
    block_tokens, head_dim, layers = get(layer + BLOCK_TOKENS), get(layer + HEAD_DIM), get(layer + LAYERS)
    block, offset = start // block_tokens, start % block_tokens  # which take long: once a strip
    block_bytes = layers * 2 * get(layer + KV_HEADS) * block_tokens * head_dim * 2
    base = get(layer + POOL) + 2 * first_of(layer, kv_head)
    for key in range(0, keys, KEYS):
        keys_at = base + blocks[block] * block_bytes + offset * head_dim * 2
        offset += 16
        if offset == block_tokens:
            block, offset = block + 1, 0
        others_at = keys_at
        if key + 16 < keys:
            others_at = base + blocks[block] * block_bytes + offset * head_dim * 2
            offset += 16
            if offset == block_tokens:
                block, offset = block + 1, 0
        at = scores_at + 64 * key
        tiles.tile_scores(keys_at, others_at, 2 * head_dim, asked_at, head_dim // 32, at, SCORE_BYTES)


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
    """Add what the values of keys from position `start` come to, from those that `lay_values` laid out."""
    head_dim = get(layer + HEAD_DIM)
    tile_bytes, parts = head_dim * KEYS * 2, (keys + KEYS - 1) // KEYS
    values_at = laid_at + (kv_head * laid_tiles + (start - laid_from) // KEYS) * tile_bytes
    step = 4 * 16 * head_dim
    for d in range(0, head_dim, 32):
        tiles.tile_mix(values_at + 64 * d, tile_bytes, weights_at, WEIGHT_BYTES, parts, sums_at + 64 * d, step)
