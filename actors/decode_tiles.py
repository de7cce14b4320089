"""Attention of one query token per sequence, tile by tile, on vectors of 16 float32 (`lanes.py`). See `kernels.py`.

Per tile and KV head: widen the K rows into scratch that stays in the first-level cache, score all query heads of the group
against them, fold the scores into a running softmax, widen the V rows, add them.

Heads are padded with zeros to multiples of 16, so a head_dim of 8 costs what 16 does; 64 and 128 have code of their own; block
sizes that are no multiple of 16 pay for gathering a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.decode_lanes import add_rows, dots, widen
from actors.lanes import HIDDEN, bounded, exp, fill, fma, highest, keep, load, prefetch, store
from kvpool.compiled import inner


@inner
def fold(
    space: Any, scores: Any, low: int, high: int, softcap: float, top_at: int, norm: int, sums: int, width: int, to: int
) -> None:
    """Fold scores of 16 tokens, of which [low, high) count, into a running softmax; their weights go to `to`.

    All in `space`: the highest score so far, 16 partial norms, and `width` sums, which shrink when a higher score turns up.
    """
    one, zero = fill(np.float32(1.0)), fill(np.float32(0.0))
    if softcap > 0.0:
        scores = bounded(scores, np.float32(softcap))
    if high - low < 16:
        scores = keep(scores, low, high, HIDDEN)
    top = highest(scores)
    norms = load(space, norm)
    if top > space[top_at]:
        shrink = exp(fill(space[top_at] - top))
        space[top_at] = top
        norms = fma(norms, shrink, zero)
        for d in range(sums, sums + width, 16):
            store(space, d, fma(load(space, d), shrink, zero))
    weight = exp(fma(fill(-space[top_at]), one, scores))
    store(space, to, weight)
    store(space, norm, fma(weight, one, norms))


@inner
def places_of(base: int, end: int, table: Any, block_tokens: int, head_dim: int, stride: int) -> tuple[int, int, int]:
    """Where tokens `base` and base + 16 are, in a piece of their block, and the block of base + 64; none behind the end."""
    soon, later = min(base + 16, end - 1), min(base + 64, end - 1)
    here = table[base // block_tokens] * stride + base % block_tokens * head_dim
    next_one = table[soon // block_tokens] * stride + soon % block_tokens * head_dim
    return here, next_one, table[later // block_tokens] * stride


@inner
def norm_of(space: Any, norm: int) -> Any:
    """What sums are divided by in the end."""
    total = np.float32(0.0)
    for lane in range(16):
        total += space[norm + lane]
    return total


@inner
def _gather(
    flat: Any,
    side: int,
    block_tokens: int,
    head_dim: int,
    stride: int,
    table: Any,
    base: int,
    low: int,
    high: int,
    space: Any,
    tile: int,
    width: int,
) -> None:
    """Rows [low, high) of the tile := the tokens at base + row, wherever their blocks are; the other rows := 0."""
    nothing = fill(np.float32(0.0))
    for row in range(16):
        to = tile + row * width
        if low <= row < high:
            at = table[(base + row) // block_tokens] * stride + side + (base + row) % block_tokens * head_dim
            widen(flat, at, head_dim, space, to)
        else:
            for d in range(0, width, 16):
                store(space, to + d, nothing)


@inner
def attend_tiles(
    sequence: int,
    first_head: int,
    last_head: int,
    query: Any,
    pool: Any,
    layer: int,
    tables: Any,
    lengths: Any,
    scale: float,
    window: int,
    softcap: float,
    out: Any,
) -> None:
    """Attention of one sequence's query token, for KV heads [first_head, last_head)."""
    end = lengths[sequence]
    begin = max(0, end - window) if window > 0 else 0
    table = tables[sequence]
    kv_heads, block_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    flat = pool.reshape(pool.size)
    group = query.shape[1] // kv_heads
    piece = block_tokens * head_dim
    stride = pool.shape[1] * 2 * kv_heads * piece
    width = (head_dim + 15) // 16 * 16
    count = (last_head - first_head) * group
    # All scratch is one array, used from a cache line's start: queries, sums, tile, weights, norms, highest scores.
    space = np.zeros(2 * count * width + 16 * (width + group + 2 * count + 1), np.float32)
    heads = (-(space.ctypes.data // 4)) % 16
    sums = heads + count * width
    tile = sums + count * width
    weights = tile + 16 * width
    norms = weights + 16 * group
    tops = norms + 16 * count
    for g in range(count):
        space[tops + g] = HIDDEN
        for d in range(head_dim):
            space[heads + g * width + d] = query[sequence, first_head * group + g, d] * np.float32(scale)
    line = 64 // flat.itemsize
    for base in range(begin - begin % 16, end, 16):
        low, high = max(begin - base, 0), min(end - base, 16)
        whole = high - low == 16 and block_tokens % 16 == 0 and width == head_dim
        here, soon, later = places_of(base, end, table, block_tokens, head_dim, stride)
        later += layer * 2 * kv_heads * piece
        for step in range(0, 2 * kv_heads * piece, 32 * line):
            prefetch(flat, later + step)
        for head in range(first_head, last_head):
            start = (head - first_head) * group
            for value in range(2):
                side = ((layer * 2 + value) * kv_heads + head) * piece
                if whole:
                    widen(flat, here + side, 16 * width, space, tile)
                else:
                    _gather(flat, side, block_tokens, head_dim, stride, table, base, low, high, space, tile, width)
                for step in range(0, min(16, block_tokens) * head_dim, line):
                    prefetch(flat, soon + side + step)
                if value:
                    add_rows(space, weights, tile, width, sums + start * width, group)
                    continue
                for member in range(group):
                    g = start + member
                    scores = dots(space, heads + g * width, tile, width)
                    at = sums + g * width
                    fold(space, scores, low, high, softcap, tops + g, norms + g * 16, at, width, weights + member * 16)
    for g in range(count):
        total = norm_of(space, norms + g * 16)
        for d in range(head_dim):
            out[sequence, first_head * group + g, d] = space[sums + g * width + d] / total
