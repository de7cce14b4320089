"""Attention of a prompt's chunk straight from the pool's blocks: for bfloat16 on the CPU, on matrix tiles or on vectors.

A thread takes twice 16 queries of one head at a time, which halves what is read, and for every strip of keys

    scores = K Q^T           keys by queries, so that every vector is one key's scores for 16 queries,
    weights = 2^(scores - highest so far)
    sums = sums * 2^(highest before - highest so far) + V^T weights

(`chunk_softmax.py`; the products are `chunk_tiles.py` or `chunk_lanes.py`). Strips that no query may see are not looked at. What
a query gets does not depend on how its prompt was cut into chunks.

Limits: blocks are multiples of 16 tokens, heads of 32 elements, those of values as long as those of keys; scores are scaled by
more than 0. A value that is no number reaches all queries of its prompt that are computed with it, also those that may not see
it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numba import carray

from actors import chunk_lanes, chunk_tiles, tiles
from actors.chunk_softmax import KEYS, LOWEST, QUERIES, STRIP, WEIGHT_BYTES, give, scale_scores, weigh
from actors.fused_kernels import GROUP, HEAD_DIM, KV_HEADS, SCALE, SOFTCAP, WINDOW, narrowed, rotate
from actors.lanes import fill, float_at, float_of, load, narrow, store, transpose, whole_at
from actors.team import run
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get

_FAR: Final = 1 << 40


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


def _with(score: Any, mix: Any) -> Any:
    """Returns what `_attend_on_lanes` says, with these two products, which as arguments could not be compiled in."""

    @inner
    def attend(record: int) -> None:
        qkv, cos, sin = narrow(get(record + 8)), narrow(get(record + 16)), narrow(get(record + 24))
        layer, first_row, count, start = get(record + 32), get(record + 40), get(record + 48), get(record + 56)
        blocks = carray(whole_at(get(record + 64)), (_FAR,))
        laid_at, laid_from, out = get(record + 72), get(record + 80), narrow(get(record + 88))
        kv_heads, head_dim, group = get(layer + KV_HEADS), get(layer + HEAD_DIM), get(layer + GROUP)
        scale, window, softcap = fill(float_of(get(layer + SCALE))), get(layer + WINDOW), float_of(get(layer + SOFTCAP))
        heads, size = kv_heads * group, QUERIES * head_dim
        laid_tiles = (start + count - laid_from + KEYS - 1) // KEYS
        groups = (count + 2 * QUERIES - 1) // (2 * QUERIES)
        # A thread's own, twice: scores, weights, sums, queries as tiles, state; then room to turn those, and for a strip's keys.
        strip_size, state_size = QUERIES * STRIP, 2 * QUERIES
        room_size = STRIP * head_dim
        space = np.zeros(3 * strip_size + 3 * size + 2 * state_size + 9 * head_dim + room_size + 16, np.float32)
        at = -(space.ctypes.data // 4) % 16  # a cache line's start
        scores, at = space[at : at + 2 * strip_size], at + 2 * strip_size
        weights, at = space[at : at + strip_size], at + strip_size
        sums, at = space[at : at + 2 * size], at + 2 * size
        asked, at = space[at : at + size], at + size
        state, at = space[at : at + 2 * state_size], at + 2 * state_size
        turned, at = space[at : at + 9 * head_dim], at + 9 * head_dim
        room = space[at : at + room_size]
        scores_at, weights_at, sums_at, asked_at = (
            scores.ctypes.data,
            weights.ctypes.data,
            sums.ctypes.data,
            asked.ctypes.data,
        )
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
                store(state, state_size * which, fill(LOWEST))
                store(state, state_size * which + QUERIES, fill(np.float32(0.0)))
            for element in range(0, both * size, 16):
                store(sums, element, fill(np.float32(0.0)))
            end = query + asking
            low = max(0, query - window + 1) // STRIP * STRIP if window > 0 else 0
            for strip in range(low, end, STRIP):
                keys = min(STRIP, end - strip)
                score(scores_at, layer, blocks, strip, keys, kv_head, asked_at, both, room)
                for which in range(both):
                    mine = scores[which * strip_size :]
                    scale_scores(mine, keys, strip - query - QUERIES * which, window, scale, softcap)
                    weigh(
                        mine,
                        (keys + KEYS - 1) // KEYS * KEYS,
                        narrow(weights_at + which * WEIGHT_BYTES),
                        state[state_size * which :],
                        sums[which * size : which * size + size],
                    )
                mix(
                    sums_at,
                    layer,
                    blocks,
                    strip,
                    keys,
                    kv_head,
                    weights_at,
                    both,
                    room,
                    laid_at,
                    laid_from,
                    laid_tiles,
                )
            for which in range(both):
                some, row = min(QUERIES, asking - QUERIES * which), first_row + here + QUERIES * which
                to, stride = (row * heads + head) * head_dim, heads * head_dim
                give(sums[which * size :], state[state_size * which :], head_dim, out, to, stride, some)
        space[0] = 0.0  # an array is freed after its last use, and its address is none

    return attend


_on_lanes, _on_tiles = _with(chunk_lanes.score, chunk_lanes.mix), _with(chunk_tiles.score, chunk_tiles.mix)


@thread_entry
def _attend_on_lanes(record: int) -> None:
    """out[r, h] of rows [first_row, first_row + count): positions from `start` of one prompt whose K and V are in the pool.

    Words: addresses of qkv, cos and sin as in `fused_kernels.write_rows`; record of the layer; first_row; count; start; address
    of the block table, int64; address of the values that `chunk_tiles.lay_values` laid out, and the position of the first of
    them; address of out, bfloat16 [rows, heads head_dim].
    """
    _on_lanes(record)


def _with_tiles() -> int:
    """The address of the same kernel on tiles, which compiles only where there are some; else 0."""
    if not tiles.supported():
        return 0

    @thread_entry
    def attend_on_tiles(record: int) -> None:
        setting = np.zeros(32, np.float32)
        tiles.begin_tiles(QUERIES, setting.ctypes.data)
        _on_tiles(record)
        tiles.end_tiles(setting.ctypes.data)
        setting[0] = 0.0  # as above

    return attend_on_tiles


_attend_on_tiles: Final = _with_tiles()


def fits(block_tokens: int, key_dim: int, value_dim: int, scale: float) -> bool:
    """Whether such chunks can be computed here."""
    return block_tokens % 16 == 0 and key_dim % 32 == 0 and value_dim == key_dim and scale > 0


def attend_chunk(
    rows_at: tuple[int, int, int],
    layer: int,
    blocks: torch.Tensor,
    rows: tuple[int, int, int],
    seen: tuple[int, int, int],
    out: torch.Tensor,
) -> None:
    """Write to `out`, bfloat16 [rows, heads head_dim], what a chunk gets whose K and V are in the pool already.

    `rows_at`: addresses of qkv, cos and sin, as in `fused_kernels.write_rows`. `layer`: address of its record. `blocks`: int64,
    of the whole prompt. `rows`: where the chunk's rows begin, how many they are, and the position of the first. `seen`: KV heads,
    elements of a head, and the window, 0 for all.
    """
    first_row, count, start = rows
    kv_heads, head_dim, window = seen
    threads = torch.get_num_threads()
    laid_at, laid_from = 0, 0
    if _attend_on_tiles:
        laid_from = max(0, start - window + 1) // STRIP * STRIP if window else 0
        tile_rows = -(-(start + count - laid_from) // KEYS) * KEYS
        laid = out.new_empty(kv_heads * tile_rows, head_dim)
        laid_at = laid.data_ptr()
        run(chunk_tiles.lay_values, threads, layer, blocks.data_ptr(), laid_from, start + count, laid_at)
    place = (first_row, count, start, blocks.data_ptr(), laid_at, laid_from)
    run(_attend_on_tiles or _attend_on_lanes, threads, *rows_at, layer, *place, out.data_ptr())
