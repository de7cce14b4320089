"""CPU kernels of a bfloat16 decoder layer, in numba: what lies between its four matrix products.

- `rms_norm`: a row over the root of its mean square, times the weight;
- `silu_product`: silu(gate) * up, both of one row;
- `decode_rows`: for rows that are one token of a sequence each: rotate q and k, write k and v into the pool, attend;
- `prompt_rows`: for the rows of a prompt's chunk: rotate q and k, write k and v into the pool, and lay q, k and v out by heads.

Everything is computed in float32 and rounded once, to the nearest bfloat16, ties to even. A row's result does not depend on
what other rows there are. Kernels take addresses and are called past numba's dispatcher (`kvpool/compiled.py`): a decode step
calls them a hundred times, and microseconds count.

The rotation is "rotate half" (Su et al., 2021, as transformers has it): with halves a and b of a head, a' = a cos - b sin and
b' = b cos + a sin, where cos and sin of a row have a value for each element of a head.

Limits: widths and half heads are multiples of 16; q, k and v of a row lie side by side, q first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, prange

from actors.kernels import attend
from actors.lanes import (
    fill,
    float_of,
    fma,
    load,
    load_narrow,
    narrow_at,
    silu,
    store,
    store_narrow,
    total,
    whole_at,
)
from kvpool.compiled import inner, long_entry, wide_entry

_ONE = np.float32(1.0)


def bits_of(value: float) -> int:
    """A float32 as an integer: what compiled entries take."""
    return int(np.float32(value).view(np.uint32))


_FAR = 1 << 46
"""A length for arrays that are made of an address alone; nothing looks at it."""


@inner
def _narrow(address: int) -> Any:
    return carray(narrow_at(address), (_FAR,))


@long_entry
def rms_norm(x: int, weight: int, out: int, rows: int, width: int, eps_bits: int) -> int:
    """out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. Addresses of bfloat16 [rows, width], [width], [rows, width]."""
    source, scale, target = _narrow(x), _narrow(weight), _narrow(out)
    eps = float_of(eps_bits)
    zero = fill(np.float32(0.0))
    for row in range(rows):
        at = row * width
        squares = zero
        for d in range(0, width, 16):
            value = load_narrow(source, at + d)
            squares = fma(value, value, squares)
        norm = fill(_ONE / np.sqrt(total(squares) / np.float32(width) + eps))
        for d in range(0, width, 16):
            value = fma(load_narrow(source, at + d), norm, zero)
            store_narrow(target, at + d, fma(value, load_narrow(scale, d), zero))
    return 0


@long_entry
def silu_product(both: int, out: int, rows: int, width: int) -> int:
    """out[r] = silu(both[r, :width]) * both[r, width:]. Addresses of bfloat16 [rows, 2 width] and [rows, width]."""
    source, target = _narrow(both), _narrow(out)
    zero = fill(np.float32(0.0))
    for row in range(rows):
        at = row * 2 * width
        for d in range(0, width, 16):
            gate = silu(load_narrow(source, at + d))
            store_narrow(target, row * width + d, fma(gate, load_narrow(source, at + width + d), zero))
    return 0


@inner
def _rotate(source: Any, at: int, cos: Any, sin: Any, angle: int, head_dim: int, out: Any, to: int) -> None:
    """One head, from bfloat16 to float32."""
    half = head_dim // 2
    zero, minus = fill(np.float32(0.0)), fill(np.float32(-1.0))
    for d in range(0, half, 16):
        first, second = load_narrow(source, at + d), load_narrow(source, at + half + d)
        turned = fma(second, fma(load_narrow(sin, angle + d), minus, zero), zero)
        store(out, to + d, fma(first, load_narrow(cos, angle + d), turned))
        turned = fma(first, load_narrow(sin, angle + half + d), zero)
        store(out, to + half + d, fma(second, load_narrow(cos, angle + half + d), turned))


@inner
def _narrowed(source: Any, at: int, count: int, out: Any, to: int) -> None:
    for d in range(0, count, 16):
        store_narrow(out, to + d, load(source, at + d))


@inner
def _copied(source: Any, at: int, count: int, out: Any, to: int) -> None:
    for d in range(count):
        out[to + d] = source[at + d]


@inner
def _write_row(
    row: int,
    qkv: Any,
    cos: Any,
    sin: Any,
    pool: Any,
    layer: int,
    group: int,
    slot_blocks: Any,
    slot_offsets: Any,
    turned: Any,
) -> None:
    """k, rotated, and v of row `row` into the pool. `turned` is room for one head."""
    kv_heads, block_tokens, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    heads = kv_heads * group
    flat = pool.reshape(pool.size)
    piece = block_tokens * head_dim
    at, angle = row * (heads + 2 * kv_heads) * head_dim, row * head_dim
    for head in range(kv_heads):
        slot = ((slot_blocks[row] * pool.shape[1] + layer) * 2 * kv_heads + head) * piece + slot_offsets[row] * head_dim
        _rotate(qkv, at + (heads + head) * head_dim, cos, sin, angle, head_dim, turned, 0)
        _narrowed(turned, 0, head_dim, flat, slot)
        _copied(qkv, at + (heads + kv_heads + head) * head_dim, head_dim, flat, slot + kv_heads * piece)


@inner
def _attend_row(
    row: int,
    first_head: int,
    last_head: int,
    qkv: Any,
    cos: Any,
    sin: Any,
    pool: Any,
    layer: int,
    group: int,
    tables: Any,
    lengths: Any,
    scale: float,
    window: int,
    softcap: float,
    out: Any,
) -> None:
    """Row `row`, for KV heads [first_head, last_head)."""
    kv_heads, head_dim = pool.shape[3], pool.shape[5]
    heads = kv_heads * group
    at, angle = row * (heads + 2 * kv_heads) * head_dim, row * head_dim
    queries = np.empty((1, heads, head_dim), np.float32)
    attended = np.empty((1, heads, head_dim), np.float32)
    flat_queries, flat_attended = queries.reshape(queries.size), attended.reshape(attended.size)
    first, count = first_head * group, (last_head - first_head) * group
    for head in range(first, first + count):
        _rotate(qkv, at + head * head_dim, cos, sin, angle, head_dim, flat_queries, head * head_dim)
    attend(
        0,
        first_head,
        last_head,
        queries,
        pool,
        layer,
        tables[row : row + 1],
        lengths[row : row + 1],
        scale,
        window,
        softcap,
        attended,
    )
    _narrowed(flat_attended, first * head_dim, count * head_dim, out, (row * heads + first) * head_dim)


@inner
def _pool(address: int, blocks: int, layers: int, kv_heads: int, block_tokens: int, head_dim: int) -> Any:
    return carray(narrow_at(address), (blocks, layers, 2, kv_heads, block_tokens, head_dim))


@long_entry
def decode_rows(
    qkv: int,
    out: int,
    cos: int,
    sin: int,
    rows: int,
    group: int,
    pool: int,
    blocks: int,
    layers: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    layer: int,
    slot_blocks: int,
    slot_offsets: int,
    tables: int,
    table_width: int,
    lengths: int,
    scale_bits: int,
    window: int,
    softcap_bits: int,
) -> int:
    """Rotate and write rows [0, rows), then attend for one after the other. Mutates the pool.

    Addresses: `qkv` bfloat16 [rows, (heads + 2 kv_heads) head_dim]; `out` bfloat16 [rows, heads head_dim]; `cos`, `sin`
    bfloat16 [rows, head_dim]; `pool` bfloat16 as in `kernels.py`; `slot_blocks`, `slot_offsets`, `lengths` int64 [rows]; `tables`
    int64 [rows, table_width]. heads = kv_heads * group.
    """
    array = _pool(pool, blocks, layers, kv_heads, block_tokens, head_dim)
    source, angle, other = _narrow(qkv), _narrow(cos), _narrow(sin)
    slots, offsets = carray(whole_at(slot_blocks), (rows,)), carray(whole_at(slot_offsets), (rows,))
    places, seen = carray(whole_at(tables), (rows, table_width)), carray(whole_at(lengths), (rows,))
    scale, softcap = float_of(scale_bits), float_of(softcap_bits)
    turned = np.empty(head_dim, np.float32)
    for row in range(rows):  # all before any attends: a row may see one beside it
        _write_row(row, source, angle, other, array, layer, group, slots, offsets, turned)
    for row in range(rows):
        _attend_row(
            row,
            0,
            kv_heads,
            source,
            angle,
            other,
            array,
            layer,
            group,
            places,
            seen,
            scale,
            window,
            softcap,
            _narrow(out),
        )
    return 0


@wide_entry
def decode_rows_in_parallel(
    qkv: int,
    out: int,
    cos: int,
    sin: int,
    rows: int,
    group: int,
    pool: int,
    blocks: int,
    layers: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    layer: int,
    slot_blocks: int,
    slot_offsets: int,
    tables: int,
    table_width: int,
    lengths: int,
    scale_bits: int,
    window: int,
    softcap_bits: int,
) -> int:
    """Like `decode_rows`, on the calling thread's number of numba threads."""
    array = _pool(pool, blocks, layers, kv_heads, block_tokens, head_dim)
    source, angle, other = _narrow(qkv), _narrow(cos), _narrow(sin)
    slots, offsets = carray(whole_at(slot_blocks), (rows,)), carray(whole_at(slot_offsets), (rows,))
    places, seen = carray(whole_at(tables), (rows, table_width)), carray(whole_at(lengths), (rows,))
    scale, softcap = float_of(scale_bits), float_of(softcap_bits)
    turned = np.empty(head_dim, np.float32)
    for row in range(rows):  # all before any attends: a row may see one beside it
        _write_row(row, source, angle, other, array, layer, group, slots, offsets, turned)
    for task in prange(rows * kv_heads):
        row, head = task // kv_heads, task % kv_heads
        _attend_row(
            row,
            head,
            head + 1,
            source,
            angle,
            other,
            array,
            layer,
            group,
            places,
            seen,
            scale,
            window,
            softcap,
            _narrow(out),
        )
    return 0


@long_entry
def prompt_rows(
    qkv: int,
    queries: int,
    keys_values: int,
    cos: int,
    sin: int,
    first: int,
    count: int,
    room: int,
    group: int,
    pool: int,
    blocks: int,
    layers: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    layer: int,
    slot_blocks: int,
    slot_offsets: int,
) -> int:
    """Rotate and write rows [first, first + count). Mutates the pool.

    Addresses as in `decode_rows`, besides: `queries` bfloat16 [heads, room, head_dim] and `keys_values` bfloat16
    [2, kv_heads, room, head_dim] are written to, `keys_values` unless it is 0; room >= count.
    """
    heads = kv_heads * group
    flat = carray(narrow_at(pool), (blocks * layers * 2 * kv_heads * block_tokens * head_dim,))
    source, turned = _narrow(qkv), np.empty(head_dim, np.float32)
    by_head, both = _narrow(queries), _narrow(keys_values)
    slots, offsets = carray(whole_at(slot_blocks), (first + count,)), carray(whole_at(slot_offsets), (first + count,))
    piece = block_tokens * head_dim
    for n in range(count):
        row = first + n
        at, angle = row * (heads + 2 * kv_heads) * head_dim, row * head_dim
        for head in range(heads):
            _rotate(source, at + head * head_dim, _narrow(cos), _narrow(sin), angle, head_dim, turned, 0)
            _narrowed(turned, 0, head_dim, by_head, (head * room + n) * head_dim)
        for head in range(kv_heads):
            slot = ((slots[row] * layers + layer) * 2 * kv_heads + head) * piece + offsets[row] * head_dim
            value = at + (heads + kv_heads + head) * head_dim
            _rotate(source, at + (heads + head) * head_dim, _narrow(cos), _narrow(sin), angle, head_dim, turned, 0)
            _narrowed(turned, 0, head_dim, flat, slot)
            _copied(source, value, head_dim, flat, slot + kv_heads * piece)
            if keys_values:
                to = (head * room + n) * head_dim
                _narrowed(turned, 0, head_dim, both, to)
                _copied(source, value, head_dim, both, kv_heads * room * head_dim + to)
    return 0
