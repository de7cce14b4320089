"""CPU kernels over the paged pool, in numba: write K and V of a step's tokens, attend one query token per sequence.

The pool is one array [blocks, layers, 2, kv_heads, block_tokens, head_dim]; index 2 is 0 for K and 1 for V. bfloat16
has no numpy type, so a bfloat16 pool is seen as uint16 and widened by a 16-bit shift; all arithmetic is float32.

A sequence's context is walked once, in tiles of 16 tokens. Per tile and KV head all query heads of the group are scored against
K, the scores folded into a running softmax (highest score, norm and unnormalised output so far; the latter two shrink when a
higher score turns up), and V added. Scratch does not grow with the context. All KV heads of a block lie side by side, so one
thread takes them in one go. There are two ways to compute a tile: `decode_tiles.py`, and `decode_pairs.py` for bfloat16 where
registers are short.

What costs most then is waiting for memory: a block's bytes of one layer are a short run on pages of their own. So the next
tile is prefetched, and four tiles ahead one word per half page, for the address translation.

The kernel is one of a team (`team.py`). A thread takes whole sequences where there are enough of them, so that a block's heads
are read together, and KV heads of a sequence else.

Sources: block tables as in PagedAttention (Kwon et al., 2023), the running softmax as in Milakov and Gimelshein (2018).
Limit: no split over the context; with few sequences and many threads some threads idle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from actors.decode_pairs import attend_pairs
from actors.decode_tiles import attend_tiles
from actors.lanes import WIDE, float_at, float_of, narrow_at, whole_at
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


def _for_all(attend: Any) -> Any:
    """Returns what shares the sequences out and calls `attend` for each, which as an argument could not be compiled in."""

    @inner
    def attend_all(record: int, pool: Any) -> None:
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

    return attend_all


_by_tiles, _by_pairs = _for_all(attend_tiles), _for_all(attend_pairs)
attend_bfloat16 = attend_tiles if WIDE else attend_pairs
"""The faster on this CPU."""


@inner
def _shape(record: int) -> tuple[int, int, int, int, int, int]:
    return get(record + 112), get(record + 120), 2, get(record + 128), get(record + 136), get(record + 144)


@thread_entry
def _float32_by_tiles(record: int) -> None:
    """Words: addresses of query, out, tables and lengths; sequences; heads; layer; width of tables; scale; window; softcap; the
    address of the pool, float32; parts; and the lengths of its dimensions but the third.
    """
    _by_tiles(record, carray(float_at(get(record + 96)), _shape(record)))


@thread_entry
def _bfloat16_by_tiles(record: int) -> None:
    """The same over a pool of bfloat16."""
    _by_tiles(record, carray(narrow_at(get(record + 96)), _shape(record)))


@thread_entry
def _bfloat16_by_pairs(record: int) -> None:
    _by_pairs(record, carray(narrow_at(get(record + 96)), _shape(record)))


_bfloat16 = _bfloat16_by_tiles if WIDE else _bfloat16_by_pairs


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
        _float32_by_tiles if pool.dtype == np.float32 else _bfloat16,
        threads,
        *(query.ctypes.data, out.ctypes.data, tables.ctypes.data, lengths.ctypes.data),
        *(sequences, heads, layer, tables.shape[1], bits_of(scale), window, bits_of(softcap)),
        *(pool.ctypes.data, parts_of(sequences, kv_heads, threads)),
        *(blocks, layers, kv_heads, block_tokens, head_dim),
    )
