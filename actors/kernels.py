"""CPU kernels over the paged pool, in numba: write K and V of a step's tokens, attend one query token per sequence.

The pool is one array [blocks, layers, 2, kv_heads, block_tokens, head_dim]; index 2 is 0 for K and 1 for V. bfloat16
has no numpy type, so a bfloat16 pool is seen as uint16 and widened by a 16-bit shift; all arithmetic is float32.

A sequence's context is walked once, in tiles of 16 tokens. Per tile and KV head: widen the K rows into scratch that stays
in the first-level cache, score all query heads of the group against them, fold the scores into a running softmax (highest
score, norm and unnormalised output so far; the latter two shrink when a higher score turns up), widen the V rows, add
them. Scratch does not grow with the context. All KV heads of a block lie side by side, so one thread takes them in one go.
What costs most then is waiting for memory: a block's bytes of one layer are a short run on pages of their own. So the next
tile is prefetched, and four tiles ahead one word per half page, for the address translation.

The arithmetic is on vectors of 16 float32 (`lanes.py`). Heads are padded with zeros to multiples of 16, so a head_dim of 8
costs what 16 does; 64 and 128 have code of their own; block sizes that are no multiple of 16 pay for gathering a tile.

With one thread the loop over sequences is plain; else numba's own work queue runs it, whose idle workers sleep. Its OpenMP
layer would bring a second OpenMP runtime beside torch's, and two runtimes that each spin between kernels starve each other
(measured: 1.9 s instead of 0.05 s a step on two cores). The work queue is not re-entrant: one thread of a process, the step
thread, runs the parallel kernel.

Sources: block tables as in PagedAttention (Kwon et al., 2023), the running softmax as in Milakov and Gimelshein (2018).
Limit: no split over the context; with few sequences and many threads some threads idle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, njit, prange, set_num_threads

from actors.lanes import HIDDEN, add_rows, bounded, dots, exp, fill, fma, highest, keep, load, prefetch, store, widen

config.THREADING_LAYER = "workqueue"


@njit(cache=True, nogil=True)
def write_kv(pool: Any, layer: int, blocks: Any, offsets: Any, key: Any, value: Any) -> None:
    """Store K and V of a step's tokens.

    `pool` as in the file header; `blocks`, `offsets` int64 [tokens]; `key`, `value` [kv_heads, tokens, head_dim] of the
    pool's element type. Mutates `pool`.
    """
    for token in range(blocks.shape[0]):
        block = blocks[token]
        offset = offsets[token]
        for head in range(key.shape[0]):
            for d in range(key.shape[2]):
                pool[block, layer, 0, head, offset, d] = key[head, token, d]
                pool[block, layer, 1, head, offset, d] = value[head, token, d]


@njit(nogil=True)
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


@njit(nogil=True)
def attend(
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
    one, zero = fill(np.float32(1.0)), fill(np.float32(0.0))
    for g in range(count):
        space[tops + g] = HIDDEN
        for d in range(head_dim):
            space[heads + g * width + d] = query[sequence, first_head * group + g, d] * np.float32(scale)
    line = 64 // flat.itemsize
    for base in range(begin - begin % 16, end, 16):
        low, high = max(begin - base, 0), min(end - base, 16)
        whole = high - low == 16 and block_tokens % 16 == 0 and width == head_dim
        here = table[base // block_tokens] * stride + base % block_tokens * head_dim
        soon, later = min(base + 16, end - 1), min(base + 64, end - 1)
        soon = table[soon // block_tokens] * stride + soon % block_tokens * head_dim
        later = table[later // block_tokens] * stride + layer * 2 * kv_heads * piece
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
                    if softcap > 0.0:
                        scores = bounded(scores, np.float32(softcap))
                    if high - low < 16:
                        scores = keep(scores, low, high, HIDDEN)
                    top = highest(scores)
                    norm = load(space, norms + g * 16)
                    if top > space[tops + g]:
                        shrink = exp(fill(space[tops + g] - top))
                        space[tops + g] = top
                        norm = fma(norm, shrink, zero)
                        for d in range(sums + g * width, sums + (g + 1) * width, 16):
                            store(space, d, fma(load(space, d), shrink, zero))
                    weight = exp(fma(fill(-space[tops + g]), one, scores))
                    store(space, weights + member * 16, weight)
                    store(space, norms + g * 16, fma(weight, one, norm))
    for g in range(count):
        total = np.float32(0.0)
        for lane in range(16):
            total += space[norms + g * 16 + lane]
        for d in range(head_dim):
            out[sequence, first_head * group + g, d] = space[sums + g * width + d] / total


@njit(cache=True, nogil=True)
def _serial(
    query: Any, pool: Any, layer: int, tables: Any, lengths: Any, scale: float, window: int, softcap: float, out: Any
) -> None:
    for sequence in range(query.shape[0]):
        attend(sequence, 0, pool.shape[3], query, pool, layer, tables, lengths, scale, window, softcap, out)


@njit(parallel=True, cache=True, nogil=True)
def _parallel(
    query: Any, pool: Any, layer: int, tables: Any, lengths: Any, scale: float, window: int, softcap: float, out: Any
) -> None:
    kv_heads = pool.shape[3]
    for task in prange(query.shape[0] * kv_heads):
        head = task % kv_heads
        attend(task // kv_heads, head, head + 1, query, pool, layer, tables, lengths, scale, window, softcap, out)


def set_threads(threads: int) -> int:
    """Let parallel kernels of the calling thread use up to `threads` threads. Returns how many they use."""
    # numba keeps the number per calling thread, so what another thread has set does not count here.
    threads = min(threads, config.NUMBA_NUM_THREADS)
    set_num_threads(threads)
    return int(threads)


def decode_attention(
    query: Any,
    pool: Any,
    layer: int,
    tables: Any,
    lengths: Any,
    scale: float,
    window: int,
    softcap: float,
    out: Any,
    threads: int,
) -> None:
    """Attention of one query token per sequence over its blocks, on up to `threads` threads.

    `query`, `out` float32 [sequences, heads, head_dim]; `pool` contiguous; `tables` int64 [sequences, blocks] (unused
    entries arbitrary); `lengths` int64 [sequences], tokens visible including the query's own. `window` > 0 keeps only the
    last `window` tokens; `softcap` > 0 bounds scores to softcap * tanh(score / softcap). Mutates `out`, and with several
    threads the calling thread's number of numba threads.
    """
    if set_threads(threads) == 1:
        _serial(query, pool, layer, tables, lengths, scale, window, softcap, out)
        return
    _parallel(query, pool, layer, tables, lengths, scale, window, softcap, out)
