"""Attention of a prompt's chunk on matrix tiles (`tiles.py`), straight from the pool's blocks: for bfloat16 on the CPU.

Two kernels for each chunk. The first, `lay_values`, lays the values of all that the chunk may see out as tiles, elements by keys;
K is fit for tiles as it lies in the pool. The second, `attend_chunk`, takes twice 16 queries of one head at a time, which halves
what is read, and for every `STRIP` keys

    scores = K Q^T           keys by queries, so that every vector is one key's scores for 16 queries,
    weights = 2^(scores - highest so far)          and nothing is ever summed across a vector,
    sums = sums * 2^(highest before - highest so far) + V^T weights

(the online softmax of Milakov and Gimelshein, 2018, with scores times log2 e). Strips that no query may see are not looked at.
Weights are rounded to bfloat16, as everybody's are; all else is float32. What a query gets does not depend on how its prompt was
cut into chunks.

Limits: blocks are multiples of 16 tokens, heads of 32 elements, those of values as long as those of keys; scores are scaled by
more than 0. A value that is no number reaches all queries of its prompt that are computed with it, also those that may not see
it.
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
"""Of a tile."""
STRIP: Final = 256
"""Keys of a strip, which begin at multiples of that: so a query's sums do not depend on its neighbours."""
_SCORES: Final = 4 * QUERIES * STRIP
_WEIGHTS: Final = 2 * QUERIES * STRIP
"""Bytes of 16 queries' scores of a strip, and of their weights."""
_FAR: Final = 1 << 40
_LOG2_E: Final = np.float32(1.4426950408889634)
_HIDDEN: Final = np.float32(-3.4e38)


@inner
def _first(layer: int, what: int) -> int:
    """Where in a block the elements of `what` begin: a KV head's keys; plus the number of KV heads, its values."""
    return (get(layer + LAYER) * 2 * get(layer + KV_HEADS) + what) * get(layer + BLOCK_TOKENS) * get(layer + HEAD_DIM)


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
                at = block * block_size + _first(layer, head) + offset * head_dim
            for d in range(0, head_dim, 16):
                for row in range(16):
                    store(square, 16 * row, load_narrow(pool, at + row * head_dim + d) if row < tokens else zero)
                transpose(square, 0)
                for row in range(16):
                    store_narrow(target, (task * head_dim + d + row) * KEYS + half, load(square, 16 * row))


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
        at = scores_at + 64 * key
        tiles.tile_scores(keys_at, others_at, 2 * head_dim, asked_at, head_dim // 32, at, _SCORES)


@inner
def _scale(scores: Any, keys: int, ahead: int, window: int, scale: Any, softcap: Any) -> None:
    """Scores, as they count, in powers of 2: of `keys` the first of which is `ahead` of the first query.

    What a query may not see, and what is missing of the last tile, becomes `_HIDDEN`.
    """
    zero, log2_e, hidden = fill(np.float32(0.0)), fill(_LOG2_E), fill(_HIDDEN)
    base = scale if softcap > 0.0 else fma(scale, log2_e, zero)
    for row in range(keys):
        score = fma(load(scores, 16 * row), base, zero)
        if softcap > 0.0:
            score = fma(bounded(score, softcap), log2_e, zero)
        # Query n sees the key where ahead <= n, and where n < ahead + window.
        if ahead > 0 or (window > 0 and ahead + window < QUERIES):
            score = keep(score, max(ahead, 0), ahead + window if window > 0 else QUERIES, _HIDDEN)
        store(scores, 16 * row, score)
        ahead += 1
    for row in range(keys, (keys + KEYS - 1) // KEYS * KEYS):
        store(scores, 16 * row, hidden)


@inner
def _highest(scores: Any, rows: int, highest: Any) -> Any:
    """The highest score of each query, and `highest`. Four at a time, because one has to wait for the other."""
    a, b, c, d = highest, highest, highest, highest
    for at in range(0, 16 * rows, 64):
        a, b = larger(load(scores, at), a), larger(load(scores, at + 16), b)
        c, d = larger(load(scores, at + 32), c), larger(load(scores, at + 48), d)
    return larger(larger(a, b), larger(c, d))


@inner
def _weigh(scores: Any, rows: int, weights: Any, state: Any, sums: Any) -> None:
    """Weights of 16 queries from their scores of a strip, `rows` keys.

    `state` are 16 times the highest score so far, and 16 times the sum of the weights so far. It, and the `sums` so far, shrink
    to what they are beside the new highest: not at all where that is the old one.
    """
    one, minus = fill(np.float32(1.0)), fill(np.float32(-1.0))
    before = load(state, 0)
    highest = _highest(scores, rows, before)
    shrink = power(fma(highest, minus, before))
    evens, odds = fill(np.float32(0.0)), fill(np.float32(0.0))
    for at in range(0, 16 * rows, 32):
        even = power(fma(highest, minus, load(scores, at)))
        odd = power(fma(highest, minus, load(scores, at + 16)))
        evens, odds = fma(even, one, evens), fma(odd, one, odds)
        store_pairs(weights, at, even, odd)
    store(state, 0, highest)
    store(state, 16, fma(load(state, 16), shrink, fma(evens, one, odds)))
    for at in range(0, sums.size, 16):
        store(sums, at, fma(load(sums, at), shrink, fill(np.float32(0.0))))


@inner
def _give(sums: Any, state: Any, head_dim: int, out: Any, at: int, stride: int, count: int) -> None:
    """What `count` queries get, from the sums of all 16, which it spoils, to `out` at `at`, `stride` elements apart."""
    for d in range(0, head_dim, 16):
        transpose(sums, 16 * d)
        for n in range(count):
            share = fill(np.float32(1.0) / state[16 + n])
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
        heads, size = kv_heads * group, QUERIES * head_dim
        value_tiles, tile_bytes = (start + count - first + KEYS - 1) // KEYS, head_dim * KEYS * 2
        groups = (count + 2 * QUERIES - 1) // (2 * QUERIES)
        # A thread's own, twice: scores, weights, sums, queries as tiles, state; then room to turn those, and the tiles' setting.
        strip_size, state_size = QUERIES * STRIP, 2 * QUERIES
        space = np.zeros(3 * strip_size + 3 * size + 2 * state_size + 9 * head_dim + 32 + 16, np.float32)
        at = -(space.ctypes.data // 4) % 16  # a cache line's start
        scores, at = space[at : at + 2 * strip_size], at + 2 * strip_size
        weights, at = space[at : at + strip_size], at + strip_size
        sums, at = space[at : at + 2 * size], at + 2 * size
        asked, at = space[at : at + size], at + size
        state, at = space[at : at + 2 * state_size], at + 2 * state_size
        turned, at = space[at : at + 9 * head_dim], at + 9 * head_dim
        scores_at, weights_at, sums_at = scores.ctypes.data, weights.ctypes.data, sums.ctypes.data
        asked_at, setting_at = asked.ctypes.data, space.ctypes.data + 4 * at
        tiles.begin_tiles(QUERIES, setting_at)
        while True:
            task = fetch_add(record, 1)
            if task >= heads * groups:
                break
            head, here = task // groups, 2 * QUERIES * (task % groups)
            kv_head, asking, query = head // group, min(2 * QUERIES, count - here), start + here
            both = 2 if asking > QUERIES else 1
            for which in range(both):
                row, some = first_row + here + QUERIES * which, min(QUERIES, asking - QUERIES * which)
                _lay_queries(qkv, cos, sin, row, some, head, layer, turned, asked[which * size // 2 :])
                store(state, state_size * which, fill(_HIDDEN))
                store(state, state_size * which + QUERIES, fill(np.float32(0.0)))
            for element in range(0, both * size, 16):
                store(sums, element, fill(np.float32(0.0)))
            end = query + asking
            low = max(0, query - window + 1) // STRIP * STRIP if window > 0 else 0
            for strip in range(low, end, STRIP):
                keys = min(STRIP, end - strip)
                _score(scores_at, layer, blocks, strip, keys, kv_head, asked_at)
                parts = (keys + KEYS - 1) // KEYS
                for which in range(both):
                    mine = scores[which * strip_size :]
                    _scale(mine, keys, strip - query - QUERIES * which, window, scale, softcap)
                    _weigh(
                        mine,
                        parts * KEYS,
                        narrow(weights_at + which * _WEIGHTS),
                        state[state_size * which :],
                        sums[which * size : which * size + size],
                    )
                values_at = values + (kv_head * value_tiles + (strip - first) // KEYS) * tile_bytes
                for d in range(0, head_dim, 32):
                    tiles.tile_mix(
                        *(values_at + 64 * d, tile_bytes, weights_at, _WEIGHTS, parts, sums_at + 64 * d, 4 * size)
                    )
            for which in range(both):
                some, row = min(QUERIES, asking - QUERIES * which), first_row + here + QUERIES * which
                to, stride = (row * heads + head) * head_dim, heads * head_dim
                _give(sums[which * size :], state[state_size * which :], head_dim, out, to, stride, some)
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


def first_laid(start: int, window: int) -> int:
    """Returns the first position whose values a chunk from position `start` needs, a strip's beginning."""
    return max(0, start - window + 1) // STRIP * STRIP if window else 0


def fits(block_tokens: int, key_dim: int, value_dim: int, scale: float) -> bool:
    """Whether such chunks can be computed here."""
    is_whole = block_tokens % 16 == 0 and key_dim % 32 == 0 and value_dim == key_dim
    return bool(attend_chunk) and is_whole and scale > 0
