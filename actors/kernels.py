"""CPU kernels over the paged pool, in numba: write K and V of a step's tokens, attend one query token per sequence.

The pool is one array [blocks, layers, 2, kv_heads, block_tokens, head_dim]; index 2 is 0 for K and 1 for V. bfloat16
has no numpy type, so a bfloat16 pool is seen as uint16 and widened by a 16-bit shift into a float32 scratch row that
stays in the first-level cache; all arithmetic is float32. One task handles one (sequence, KV head): its blocks are read
once and serve all query heads of the group. Scores of a task live in one scratch array of context length, so memory is
bounded by threads x group x context x 4 bytes.

Threads come from numba's own work queue, whose idle workers sleep. Its OpenMP layer would bring a second OpenMP runtime
beside torch's, and two runtimes that each spin between kernels starve each other (measured: 1.9 s instead of 0.05 s a step
on two cores). The work queue is not re-entrant: one thread of a process, the step thread, runs the parallel kernel.

Source of the algorithm: block-table attention as described for PagedAttention (Kwon et al., 2023), two passes, no split
over the context: with few sequences and many threads some threads idle.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import config, njit, prange, types
from numba.extending import overload

config.THREADING_LAYER = "workqueue"


def _widen(source: Any, target: Any) -> None:
    """Copy the [rows, width] block `source` (float32, or bfloat16 bits as uint16) into the float32 array `target`."""
    raise AssertionError("compiled only")


@overload(_widen)
def _widen_overload(source: Any, target: Any) -> Any:
    if source.dtype == types.uint16:

        def widen_bfloat16(source: Any, target: Any) -> None:
            bits = target.view(np.uint32)
            for row in range(source.shape[0]):
                for column in range(source.shape[1]):
                    bits[row, column] = np.uint32(source[row, column]) << np.uint32(16)

        return widen_bfloat16

    def copy_float32(source: Any, target: Any) -> None:
        for row in range(source.shape[0]):
            for column in range(source.shape[1]):
                target[row, column] = source[row, column]

    return copy_float32


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


@njit(parallel=True, fastmath=True, cache=True, nogil=True)
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
) -> None:
    """Attention of one query token per sequence over its blocks.

    `query`, `out` float32 [sequences, heads, head_dim]; `tables` int64 [sequences, blocks] (unused entries arbitrary);
    `lengths` int64 [sequences], tokens visible including the query's own. `window` > 0 keeps only the last `window`
    tokens; `softcap` > 0 bounds scores to softcap * tanh(score / softcap). Mutates `out`.
    """
    kv_heads = pool.shape[3]
    block_tokens = pool.shape[4]
    head_dim = pool.shape[5]
    group = query.shape[1] // kv_heads
    for task in prange(query.shape[0] * kv_heads):
        sequence = task // kv_heads
        kv_head = task % kv_heads
        end = lengths[sequence]
        begin = max(0, end - window) if window > 0 else 0
        first_block = begin // block_tokens
        last_block = (end + block_tokens - 1) // block_tokens
        scores = np.empty((group, end - begin), np.float32)
        rows = np.empty((block_tokens, head_dim), np.float32)
        for index in range(first_block, last_block):
            _widen(pool[tables[sequence, index], layer, 0, kv_head], rows)
            low = max(begin - index * block_tokens, 0)
            high = min(end - index * block_tokens, block_tokens)
            for member in range(group):
                head = kv_head * group + member
                for offset in range(low, high):
                    total = np.float32(0.0)
                    for d in range(head_dim):
                        total += query[sequence, head, d] * rows[offset, d]
                    total *= np.float32(scale)
                    if softcap > 0.0:
                        total = np.float32(softcap * math.tanh(total / softcap))
                    scores[member, index * block_tokens + offset - begin] = total
        for member in range(group):
            highest = scores[member].max()
            norm = np.float32(0.0)
            for position in range(end - begin):
                weight = math.exp(scores[member, position] - highest)
                scores[member, position] = weight
                norm += weight
            inverse = np.float32(1.0) / norm
            for position in range(end - begin):
                scores[member, position] *= inverse
            for d in range(head_dim):
                out[sequence, kv_head * group + member, d] = np.float32(0.0)
        for index in range(first_block, last_block):
            _widen(pool[tables[sequence, index], layer, 1, kv_head], rows)
            low = max(begin - index * block_tokens, 0)
            high = min(end - index * block_tokens, block_tokens)
            for member in range(group):
                head = kv_head * group + member
                for offset in range(low, high):
                    weight = scores[member, index * block_tokens + offset - begin]
                    for d in range(head_dim):
                        out[sequence, head, d] += weight * rows[offset, d]
