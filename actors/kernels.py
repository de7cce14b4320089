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

The kernel is one of a team (`team.py`). A thread takes whole sequences where there are enough of them, so that a block's heads
are read together, and KV heads of a sequence else.

Sources: block tables as in PagedAttention (Kwon et al., 2023), the running softmax as in Milakov and Gimelshein (2018).
Limit: no split over the context; with few sequences and many threads some threads idle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from actors.decode_lanes import add_rows, dots, widen
from actors.lanes import (
    HIDDEN,
    bounded,
    exp,
    fill,
    float_at,
    float_of,
    fma,
    highest,
    keep,
    load,
    narrow_at,
    prefetch,
    store,
    whole_at,
)
from actors.team import run
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get


@njit(cache=True, nogil=True, error_model="numpy")
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


@njit(nogil=True, error_model="numpy")
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


@njit(nogil=True, error_model="numpy")
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


@inner
def _attend_all(record: int, pool: Any) -> None:
    sequences, heads, layer, parts = get(record + 40), get(record + 48), get(record + 56), get(record + 104)
    kv_heads, head_dim = pool.shape[3], pool.shape[5]
    query = carray(float_at(get(record + 8)), (sequences, heads, head_dim))
    out = carray(float_at(get(record + 16)), (sequences, heads, head_dim))
    tables = carray(whole_at(get(record + 24)), (sequences, get(record + 64)))
    lengths = carray(whole_at(get(record + 32)), (sequences,))
    scale, window, softcap = float_of(get(record + 72)), get(record + 80), float_of(get(record + 88))
    while True:
        task = fetch_add(record, 1)
        if task >= sequences * parts:
            break
        first, last = kv_heads * (task % parts) // parts, kv_heads * (task % parts + 1) // parts
        attend(task // parts, first, last, query, pool, layer, tables, lengths, scale, window, softcap, out)


@inner
def _shape(record: int) -> tuple[int, int, int, int, int, int]:
    return get(record + 112), get(record + 120), 2, get(record + 128), get(record + 136), get(record + 144)


@thread_entry
def _attend_float32(record: int) -> None:
    """Words: addresses of query, out, tables and lengths; sequences; heads; layer; width of tables; scale; window; softcap; the
    address of the pool, float32; parts; and the lengths of its dimensions but the third.
    """
    _attend_all(record, carray(float_at(get(record + 96)), _shape(record)))


@thread_entry
def _attend_bfloat16(record: int) -> None:
    """The same over a pool of bfloat16."""
    _attend_all(record, carray(narrow_at(get(record + 96)), _shape(record)))


def parts_of(sequences: int, kv_heads: int, threads: int) -> int:
    """In how many parts, each some of the KV heads, a sequence is computed, so that all threads have work."""
    return 1 if threads == 1 or sequences >= 3 * threads else kv_heads


def bits_of(value: float) -> int:
    """A float32 as an integer: what compiled kernels are told."""
    return int(np.float32(value).view(np.uint32))


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
    last `window` tokens; `softcap` > 0 bounds scores to softcap * tanh(score / softcap). Mutates `out`. Arrays are contiguous.
    """
    sequences, heads, _ = query.shape
    blocks, layers, _, kv_heads, block_tokens, head_dim = pool.shape
    run(
        _attend_float32 if pool.dtype == np.float32 else _attend_bfloat16,
        threads,
        *(query.ctypes.data, out.ctypes.data, tables.ctypes.data, lengths.ctypes.data),
        *(sequences, heads, layer, tables.shape[1], bits_of(scale), window, bits_of(softcap)),
        *(pool.ctypes.data, parts_of(sequences, kv_heads, threads)),
        *(blocks, layers, kv_heads, block_tokens, head_dim),
    )
