"""The same as `decode_tiles.py` over bfloat16, for CPUs with 16 registers of 8 float32 (AVX2).

Rows are not widened into scratch, and what a row is widened to in registers serves several query heads. A word of 32 bits holds
two elements of a head: moved up it is the first, without its low half the second. So queries and sums are kept by halves, all
first elements and then all second ones.

The next tile is asked for word by word while this one is computed: a run of prefetches would hold up the arithmetic until
memory has answered most of them, so that the two would take turns.

Where registers are wider, 16 elements at a time and more registers make up for all that, and `decode_tiles.py` serves.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from actors.decode_lanes import add_lanes
from actors.decode_tiles import fold, norm_of, places_of
from actors.lanes import FLOAT, HIDDEN, emit_prefetch, load, narrow_at, prefetch
from kvpool.compiled import inner

_LANES: Final = 8
_VECTOR = ir.VectorType(FLOAT, _LANES)
_WORDS = ir.VectorType(ir.IntType(32), _LANES)
_WORD = ir.IntType(64)
_ROWS: Final = {1: 8, 2: 4, 3: 4, 4: 2}
"""Tokens at a time by heads at a time: their sums, and what they are made of, fit into the registers."""
_TOKENS: Final = 16


def _at(builder: Any, address: Any, offset: Any, kind: Any = _VECTOR) -> Any:
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 4
    return value


def _elements(builder: Any, pointer: Any) -> tuple[Any, Any]:
    """The first and the second elements of eight words."""
    words = _load(builder, pointer)
    first = builder.shl(words, ir.Constant(_WORDS, [16] * _LANES))
    second = builder.and_(words, ir.Constant(_WORDS, [-65536] * _LANES))
    return builder.bitcast(first, _VECTOR), builder.bitcast(second, _VECTOR)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32"), (a, b, c))


def _scores_of(heads: int) -> Any:
    @intrinsic
    def scores(typing: Any, keys: Any, queries: Any, words: Any, out: Any, next_at: Any) -> Any:
        """out[head, token] := queries[head] times keys[token], of 16 tokens and so many heads.

        Addresses: of keys, bfloat16 [16, 2 words]; queries, float32 [heads, 2, words]; out, float32 [heads, 16]; and of the next
        tile's keys, which are asked for.
        """

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            keys, queries, words, out, next_at = args
            half = builder.mul(words, _WORD(4))
            places = [(head, token) for head in range(heads) for token in range(_TOKENS)]
            slots = {place: cgutils.alloca_once(builder, _VECTOR) for place in places}
            for slot in slots.values():
                builder.store(ir.Constant(_VECTOR, [0.0] * _LANES), slot)
            for block in range(0, _TOKENS, _ROWS[heads]):
                with cgutils.for_range_slice(builder, _WORD(0), half, _WORD(4 * _LANES), _WORD) as (offset, _):
                    asked = []
                    for head in range(heads):
                        start = builder.add(offset, builder.mul(half, _WORD(2 * head)))
                        both = (start, builder.add(start, half))
                        asked.append([_load(builder, _at(builder, queries, place)) for place in both])
                    for token in range(block, block + _ROWS[heads]):
                        place = builder.add(offset, builder.mul(half, _WORD(token)))
                        found = _elements(builder, _at(builder, keys, place, _WORDS))
                        emit_prefetch(builder, _at(builder, next_at, place))
                        for head in range(heads):
                            slot = slots[head, token]
                            for part, query in zip(found, asked[head], strict=True):
                                builder.store(_fma(builder, part, query, builder.load(slot)), slot)
            for head in range(heads):
                for first in range(0, _TOKENS, _LANES):
                    rows = [builder.load(slots[head, token]) for token in range(first, first + _LANES)]
                    target = _at(builder, out, _WORD(4 * (head * _TOKENS + first)))
                    builder.store(add_lanes(builder, rows), target).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return scores


def _sums_of(heads: int) -> Any:
    @intrinsic
    def sums(typing: Any, values: Any, weights: Any, words: Any, out: Any, next_at: Any) -> Any:
        """out[head] += weights[head] times values, of 16 tokens and so many heads.

        Addresses: of values, bfloat16 [16, 2 words]; weights, float32 [heads, 16]; out, float32 [heads, 2, words]; and of the
        next tile's values, which are asked for.
        """

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, weights, words, out, next_at = args
            half = builder.mul(words, _WORD(4))
            with cgutils.for_range_slice(builder, _WORD(0), half, _WORD(4 * _LANES), _WORD) as (offset, _):
                targets = []
                for head in range(heads):
                    start = builder.add(offset, builder.mul(half, _WORD(2 * head)))
                    targets.append([_at(builder, out, place) for place in (start, builder.add(start, half))])
                totals = [[_load(builder, target) for target in both] for both in targets]
                for token in range(_TOKENS):
                    place = builder.add(offset, builder.mul(half, _WORD(token)))
                    found = _elements(builder, _at(builder, values, place, _WORDS))
                    emit_prefetch(builder, _at(builder, next_at, place))
                    for head in range(heads):
                        weight = builder.load(_at(builder, weights, _WORD(4 * (head * _TOKENS + token)), FLOAT))
                        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), weight, ir.IntType(32)(0))
                        weight = builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * _LANES))
                        totals[head] = [
                            _fma(builder, weight, part, total) for part, total in zip(found, totals[head], strict=True)
                        ]
                for both, results in zip(targets, totals, strict=True):
                    for target, result in zip(both, results, strict=True):
                        builder.store(result, target).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return sums


_scores_1, _scores_2, _scores_3, _scores_4 = (_scores_of(heads) for heads in _ROWS)
_sums_1, _sums_2, _sums_3, _sums_4 = (_sums_of(heads) for heads in _ROWS)


@inner
def _score(keys: int, queries: int, words: int, out: int, heads: int, next_at: int) -> None:
    """For any number of heads."""
    while heads > 0:
        some = min(heads, 4)
        if some == 1:
            _scores_1(keys, queries, words, out, next_at)
        elif some == 2:
            _scores_2(keys, queries, words, out, next_at)
        elif some == 3:
            _scores_3(keys, queries, words, out, next_at)
        else:
            _scores_4(keys, queries, words, out, next_at)
        heads, queries, out = heads - some, queries + 8 * words * some, out + 64 * some


@inner
def _add(values: int, weights: int, words: int, out: int, heads: int, next_at: int) -> None:
    while heads > 0:
        some = min(heads, 4)
        if some == 1:
            _sums_1(values, weights, words, out, next_at)
        elif some == 2:
            _sums_2(values, weights, words, out, next_at)
        elif some == 3:
            _sums_3(values, weights, words, out, next_at)
        else:
            _sums_4(values, weights, words, out, next_at)
        heads, weights, out = heads - some, weights + 64 * some, out + 8 * words * some


@inner
def _gathered(
    flat: Any,
    side: int,
    block_tokens: int,
    head_dim: int,
    stride: int,
    table: Any,
    base: int,
    low: int,
    high: int,
    tile: Any,
) -> None:
    """Rows [low, high) of the tile [16, width] := the tokens at base + row, wherever their blocks are; all else := 0."""
    tile[:] = 0
    width = tile.size // _TOKENS
    for row in range(low, high):
        at = table[(base + row) // block_tokens] * stride + side + (base + row) % block_tokens * head_dim
        for d in range(head_dim):
            tile[row * width + d] = flat[at + d]


@inner
def attend_pairs(
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
    words = width // 2
    count = (last_head - first_head) * group
    # All scratch is one array, used from a cache line's start: queries, sums, scores, weights, norms, a tile, highest scores.
    space = np.zeros(2 * count * width + 16 * (2 * group + count) + 8 * width + count + 16, np.float32)
    heads = (-(space.ctypes.data // 4)) % 16
    sums = heads + count * width
    scored = sums + count * width
    weights = scored + 16 * group
    norms = weights + 16 * group
    gathered = norms + 16 * count
    tops = gathered + 8 * width
    address = space.ctypes.data
    tile = carray(narrow_at(address + 4 * gathered), (_TOKENS * width,))
    pool_at = pool.ctypes.data
    for g in range(count):
        space[tops + g] = HIDDEN
        for d in range(head_dim):
            place = heads + g * width + d % 2 * words + d // 2
            space[place] = query[sequence, first_head * group + g, d] * np.float32(scale)
    for base in range(begin - begin % 16, end, 16):
        low, high = max(begin - base, 0), min(end - base, 16)
        whole = high - low == 16 and block_tokens % 16 == 0 and width == head_dim
        here, soon, later = places_of(base, end, table, block_tokens, head_dim, stride)
        later += layer * 2 * kv_heads * piece
        for step in range(0, 2 * kv_heads * piece, 32 * 32):
            prefetch(flat, later + step)
        for head in range(first_head, last_head):
            start = (head - first_head) * group
            for value in range(2):
                side = ((layer * 2 + value) * kv_heads + head) * piece
                rows_at = pool_at + 2 * (here + side)
                if not whole:
                    _gathered(flat, side, block_tokens, head_dim, stride, table, base, low, high, tile)
                    rows_at = address + 4 * gathered
                next_at = pool_at + 2 * (soon + side)
                if value:
                    _add(rows_at, address + 4 * weights, words, address + 4 * (sums + start * width), group, next_at)
                    continue
                _score(rows_at, address + 4 * (heads + start * width), words, address + 4 * scored, group, next_at)
                for member in range(group):
                    g = start + member
                    scores = load(space, scored + 16 * member)
                    at, to = sums + g * width, weights + 16 * member
                    fold(space, scores, low, high, softcap, tops + g, norms + 16 * g, at, width, to)
    for g in range(count):
        total = norm_of(space, norms + 16 * g)
        for d in range(head_dim):
            value_at = sums + g * width + d % 2 * words + d // 2
            out[sequence, first_head * group + g, d] = space[value_at] / total
    space[0] = 0.0  # an array is freed after its last use, and its address is none
