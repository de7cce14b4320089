"""Attention of a prompt's chunk on matrix tiles (`tiles.py`), straight from the pool's blocks: for bfloat16 on the CPU.

Two kernels for each chunk. The first, `lay_values`, lays the values of all that the chunk may see out as tiles, elements by keys;
K is fit for tiles as it lies in the pool. The second, `attend_chunk`, takes 16 queries of one head at a time, and for
every `_STRIP` keys

    scores = K Q^T           keys by queries, so that every vector is one key's scores for 16 queries,
    weights = exp(scores - highest so far)        and nothing is ever summed across a vector,
    sums = sums * exp(highest before - highest so far) + V^T weights

(the online softmax of Milakov and Gimelshein, 2018). Keys that no query may see are not looked at. Weights are rounded to
bfloat16, as everybody's are; all else is float32. What a query gets does not depend on how its prompt was cut into chunks.

Limits: blocks are multiples of 16 tokens, heads of 32 elements, those of values as long as those of keys; scores are scaled by
more than 0.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray

from actors import tiles
from actors.fused_kernels import (
    BLOCK_TOKENS,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYER,
    LAYERS,
    POOL,
    SCALE,
    SOFTCAP,
    WINDOW,
    narrowed,
    rotate,
)
from actors.lanes import (
    HIDDEN,
    bounded,
    fill,
    float_at,
    float_of,
    fma,
    keep,
    larger,
    load,
    load_narrow,
    narrow,
    power,
    store,
    store_narrow,
    store_pairs,
    transpose,
    whole_at,
)
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get

KEYS: Final = 32
"""Of a tile of values."""
QUERIES: Final = 16
_STRIP: Final = 256
_FAR: Final = 1 << 40
_LOG2_E: Final = np.float32(1.4426950408889634)


@inner
def _first(layer: int, what: int) -> int:
    """Where in a block the elements of `what` begin: a KV head's keys; plus the number of KV heads, its values."""
    return (get(layer + LAYER) * 2 * get(layer + KV_HEADS) + what) * get(layer + BLOCK_TOKENS) * get(layer + HEAD_DIM)


@thread_entry
def lay_values(record: int) -> None:
    """Values of positions [first, end) as tiles; zeros where a tile goes on behind the end.

    Words: record of the layer; address of the block table, int64; first, a multiple of 32; end; and the address of the tiles,
    bfloat16 [kv_heads, tiles, head_dim, 32].
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
                at = block * block_size + _first(layer, head) + offset * head_dim
            for d in range(0, head_dim, 16):
                for row in range(16):
                    store(square, 16 * row, load_narrow(pool, at + row * head_dim + d) if row < tokens else zero)
                transpose(square, 0)
                for row in range(16):
                    store_narrow(target, (task * head_dim + d + row) * KEYS + half, load(square, 16 * row))


_mix_two, _mix_four = tiles.tile_mix(2), tiles.tile_mix(4)


@inner
def _lay_queries(
    qkv: Any, cos: Any, sin: Any, row: int, count: int, head: int, layer: int, turned: Any, asked: Any
) -> None:
    """Rotated queries of rows [row, row + count), as tiles; those missing are zeros. `turned` is room for 17 heads."""
    head_dim, kv_heads = get(layer + HEAD_DIM), get(layer + KV_HEADS)
    heads, words = kv_heads * (get(layer + GROUP) + 2), head_dim // 2
    rows_at = turned.ctypes.data + 4 * head_dim
    rows, pairs = narrow(rows_at), carray(float_at(rows_at), (_FAR,))
    for n in range(QUERIES):
        if n < count:
            rotate(qkv, ((row + n) * heads + head) * head_dim, cos, sin, (row + n) * head_dim, head_dim, turned, 0)
            narrowed(turned, 0, head_dim, rows, n * head_dim)
        else:
            for word in range(0, words, 16):
                store(pairs, n * words + word, fill(np.float32(0.0)))
    for word in range(0, words, 16):
        for n in range(QUERIES):
            store(asked, 16 * (word + n), load(pairs, n * words + word))
        transpose(asked, 16 * word)


@inner
def _score(scores_at: int, layer: int, blocks: Any, start: int, keys: int, kv_head: int, asked_at: int) -> None:
    """Scores of keys from position `start`, in pairs of 16; what is behind the last is no matter."""
    block_tokens, head_dim, layers = get(layer + BLOCK_TOKENS), get(layer + HEAD_DIM), get(layer + LAYERS)
    block, offset = start // block_tokens, start % block_tokens  # which take long: once a strip
    block_bytes = layers * 2 * get(layer + KV_HEADS) * block_tokens * head_dim * 2
    base = get(layer + POOL) + 2 * _first(layer, kv_head)
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
        tiles.tile_scores(keys_at, others_at, 2 * head_dim, asked_at, head_dim // 32, scores_at + 64 * key)


@inner
def _hide(scores: Any, keys: int, ahead: int, window: int, hidden: Any) -> None:
    """Scores that do not count become `hidden`, of `keys` the first of which is `ahead` of the first query."""
    for row in range(keys):
        # Query n sees the key where ahead <= n, and where n < ahead + window.
        if ahead > 0 or (window > 0 and ahead + window < QUERIES):
            high = ahead + window if window > 0 else QUERIES
            store(scores, 16 * row, keep(load(scores, 16 * row), max(ahead, 0), high, hidden))
        ahead += 1


@inner
def _highest(scores: Any, rows: int, highest: Any) -> Any:
    """The highest score of each query, and `highest`. Four at a time, because one has to wait for the other."""
    a, b, c, d = highest, highest, highest, highest
    for at in range(0, 16 * rows, 64):
        a, b = larger(load(scores, at), a), larger(load(scores, at + 16), b)
        c, d = larger(load(scores, at + 32), c), larger(load(scores, at + 48), d)
    return larger(larger(a, b), larger(c, d))


@inner
def _give(sums: Any, total: Any, space: Any, head_dim: int, out: Any, at: int, stride: int, count: int) -> None:
    """What `count` queries get, from the sums of all 16, which it spoils, to `out` at `at`, `stride` elements apart."""
    store(space, 0, total)
    for d in range(0, head_dim, 16):
        transpose(sums, 16 * d)
        for n in range(count):
            share = fill(np.float32(1.0) / space[n])
            store_narrow(out, at + n * stride + d, fma(load(sums, 16 * (d + n)), share, fill(np.float32(0.0))))


def _attend_with_tiles() -> int:
    """The address of the kernel, which compiles only where there are tiles; else 0."""
    if not tiles.supported():
        return 0

    @thread_entry
    def attend_chunk(record: int) -> None:
        qkv, cos, sin = narrow(get(record + 8)), narrow(get(record + 16)), narrow(get(record + 24))
        layer, first_row, count, start = get(record + 32), get(record + 40), get(record + 48), get(record + 56)
        blocks = carray(whole_at(get(record + 64)), (_FAR,))
        values, first, out = get(record + 72), get(record + 80), narrow(get(record + 88))
        kv_heads, head_dim, group = get(layer + KV_HEADS), get(layer + HEAD_DIM), get(layer + GROUP)
        scale, window, softcap = fill(float_of(get(layer + SCALE))), get(layer + WINDOW), float_of(get(layer + SOFTCAP))
        # A score in powers of 2; a bounded one is scaled already.
        base = fill(_LOG2_E if softcap > 0.0 else float_of(get(layer + SCALE)) * _LOG2_E)
        heads = kv_heads * group
        value_tiles, tile_bytes = (start + count - first + KEYS - 1) // KEYS, head_dim * KEYS * 2
        groups = (count + QUERIES - 1) // QUERIES
        # A thread's own: scores, weights, sums, queries as tiles, room to turn them, and the tiles' setting.
        space = np.zeros(24 * _STRIP + 33 * head_dim + 32 + 16, np.float32)
        at = -(space.ctypes.data // 4) % 16  # a cache line's start
        scores, at = space[at : at + 16 * _STRIP], at + 16 * _STRIP
        weights, at = space[at : at + 8 * _STRIP], at + 8 * _STRIP
        sums, at = space[at : at + 16 * head_dim], at + 16 * head_dim
        asked, at = space[at : at + 8 * head_dim], at + 8 * head_dim
        turned, at = space[at : at + 9 * head_dim], at + 9 * head_dim
        scores_at, weights_at, sums_at = scores.ctypes.data, weights.ctypes.data, sums.ctypes.data
        pairs, asked_at, setting_at = narrow(weights_at), asked.ctypes.data, space.ctypes.data + 4 * at
        zero, one, minus = fill(np.float32(0.0)), fill(np.float32(1.0)), fill(np.float32(-1.0))
        tiles.begin_tiles(16, setting_at)
        while True:
            task = fetch_add(record, 1)
            if task >= heads * groups:
                break
            head, here = task // groups, QUERIES * (task % groups)
            kv_head, asking, query = head // group, min(QUERIES, count - here), start + here
            _lay_queries(qkv, cos, sin, first_row + here, asking, head, layer, turned, asked)
            for row in range(head_dim):
                store(sums, 16 * row, zero)
            highest, total, end = fill(HIDDEN), zero, query + asking
            low = max(0, query - window + 1) // KEYS * KEYS if window > 0 else 0
            for strip in range(low, end, _STRIP):
                keys = min(_STRIP, end - strip)
                _score(scores_at, layer, blocks, strip, keys, kv_head, asked_at)
                if softcap > 0.0:
                    for row in range(keys):
                        store(scores, 16 * row, bounded(fma(load(scores, 16 * row), scale, zero), softcap))
                _hide(scores, keys, strip - query, window, HIDDEN)
                parts = (keys + KEYS - 1) // KEYS
                for row in range(keys, parts * KEYS):
                    store(scores, 16 * row, fill(HIDDEN))
                now = _highest(scores, parts * KEYS, highest)
                bias = fma(fma(now, base, zero), minus, zero)
                shrink = power(fma(highest, base, bias))
                evens, odds = zero, zero
                for at in range(0, 16 * parts * KEYS, 32):
                    even = power(fma(load(scores, at), base, bias))
                    odd = power(fma(load(scores, at + 16), base, bias))
                    evens, odds = fma(even, one, evens), fma(odd, one, odds)
                    store_pairs(pairs, at, even, odd)
                total = fma(total, shrink, fma(evens, one, odds))
                if strip > low:
                    for row in range(head_dim):
                        store(sums, 16 * row, fma(load(sums, 16 * row), shrink, zero))
                highest = now
                values_at = values + (kv_head * value_tiles + (strip - first) // KEYS) * tile_bytes
                if head_dim % 64 == 0:
                    for d in range(0, head_dim, 64):
                        _mix_four(values_at + 64 * d, tile_bytes, weights_at, parts, sums_at + 64 * d)
                else:
                    for d in range(0, head_dim, 32):
                        _mix_two(values_at + 64 * d, tile_bytes, weights_at, parts, sums_at + 64 * d)
            to = ((first_row + here) * heads + head) * head_dim
            _give(sums, total, scores, head_dim, out, to, heads * head_dim, asking)
        tiles.end_tiles(setting_at)
        space[0] = 0.0  # an array is freed after its last use, and its address is none

    return attend_chunk


attend_chunk: Final = _attend_with_tiles()
"""The kernel's address, 0 where there are no tiles.

out[r, h] of rows [first_row, first_row + count), the positions from `start` of one prompt whose K and V are in the pool already.

Words: addresses of qkv, cos and sin as in `fused_kernels.write_rows`; record of the layer; first_row; count; start; address of
the block table, int64; address of the values that `lay_values` laid out, and the position of the first of them; address of
out, bfloat16 [rows, heads head_dim].
"""


def fits(block_tokens: int, key_dim: int, value_dim: int, scale: float) -> bool:
    """Whether such chunks can be computed here."""
    is_whole = block_tokens % 16 == 0 and key_dim % 32 == 0 and value_dim == key_dim
    return bool(attend_chunk) and is_whole and scale > 0
