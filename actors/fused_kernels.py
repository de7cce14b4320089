"""CPU kernels of a bfloat16 decoder layer, in numba: what lies between its four matrix products.

- `rms_norm`: a row over the root of its mean square, times the weight;
- `silu_product`: silu(gate) * up, both of one row;
- `write_rows`: rotate k, write k and v into the pool;
- `attend_rows`: for rows that are one token of a sequence each: rotate q and attend;
- `prompt_rows`: for the rows of a prompt's chunk: rotate q and k, write k and v into the pool, and lay q, k and v out by heads.

Everything is computed in float32 and rounded once, to the nearest bfloat16, ties to even. A row's result does not depend on
what other rows there are, nor on which thread computes it. They are kernels of a team (`team.py`): the words of their records are
named here, addresses and numbers. What a layer or a step has to tell is a record of its own, at an address in those.

The rotation is "rotate half" (Su et al., 2021, as transformers has it): with halves a and b of a head, a' = a cos - b sin and
b' = b cos + a sin, where cos and sin of a row have a value for each element of a head.

Limits: widths and half heads are multiples of 16; q, k and v of a row lie side by side, q first.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray

from actors.kernels import attend_bfloat16
from actors.lanes import (
    fill,
    float_of,
    fma,
    load,
    load_narrow,
    narrow,
    narrow_at,
    silu,
    store,
    store_narrow,
    total,
    whole_at,
)
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get

_ONE = np.float32(1.0)


_ROWS: Final = 16
"""Rows that a thread takes at a time, of many."""

# What a layer tells; the pool is bfloat16, as in `kernels.py`.
(
    GROUP,  # query heads for each of K and V
    POOL,  # address
    BLOCKS,
    LAYERS,
    KV_HEADS,
    BLOCK_TOKENS,
    HEAD_DIM,
    LAYER,
    SCALE,  # of scores, bits of a float32
    WINDOW,
    SOFTCAP,  # bits of a float32
) = range(0, 8 * 11, 8)

# What a step tells, as in `StepBatch`. Addresses of int64.
SLOT_BLOCKS, SLOT_OFFSETS, TABLES, TABLE_WIDTH, LENGTHS = range(0, 8 * 5, 8)


@thread_entry
def rms_norm(record: int) -> None:
    """out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight.

    Words: addresses of x, weight and out, bfloat16 [rows, width], [width], [rows, width]; rows; width; eps as bits of a float32.
    """
    source, scale, target = narrow(get(record + 8)), narrow(get(record + 16)), narrow(get(record + 24))
    rows, width, eps = get(record + 32), get(record + 40), float_of(get(record + 48))
    zero = fill(np.float32(0.0))
    while True:
        first = fetch_add(record, _ROWS)
        if first >= rows:
            break
        for row in range(first, min(first + _ROWS, rows)):
            at = row * width
            squares = zero
            for d in range(0, width, 16):
                value = load_narrow(source, at + d)
                squares = fma(value, value, squares)
            norm = fill(_ONE / np.sqrt(total(squares) / np.float32(width) + eps))
            for d in range(0, width, 16):
                value = fma(load_narrow(source, at + d), norm, zero)
                store_narrow(target, at + d, fma(value, load_narrow(scale, d), zero))


@thread_entry
def silu_product(record: int) -> None:
    """out[r] = silu(both[r, :width]) * both[r, width:].

    Words: addresses of both and out, bfloat16 [rows, 2 width] and [rows, width]; rows; width.
    """
    source, target = narrow(get(record + 8)), narrow(get(record + 16))
    rows, width = get(record + 24), get(record + 32)
    zero = fill(np.float32(0.0))
    while True:
        first = fetch_add(record, _ROWS)
        if first >= rows:
            break
        for row in range(first, min(first + _ROWS, rows)):
            at = row * 2 * width
            for d in range(0, width, 16):
                gate = silu(load_narrow(source, at + d))
                store_narrow(target, row * width + d, fma(gate, load_narrow(source, at + width + d), zero))


@inner
def first_of(layer: int, what: int) -> int:
    """Where in a block the elements of `what` begin: a KV head's keys; plus the number of KV heads, its values."""
    return (get(layer + LAYER) * 2 * get(layer + KV_HEADS) + what) * get(layer + BLOCK_TOKENS) * get(layer + HEAD_DIM)


@inner
def rotate(source: Any, at: int, cos: Any, sin: Any, angle: int, head_dim: int, out: Any, to: int) -> None:
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
def narrowed(source: Any, at: int, count: int, out: Any, to: int) -> None:
    for d in range(0, count, 16):
        store_narrow(out, to + d, load(source, at + d))


@inner
def _copied(source: Any, at: int, count: int, out: Any, to: int) -> None:
    for d in range(count):
        out[to + d] = source[at + d]


@inner
def _write_row(
    row: int, qkv: Any, cos: Any, sin: Any, layer: int, slot_blocks: Any, slot_offsets: Any, turned: Any
) -> None:
    """k, rotated, and v of row `row` into the pool. `turned` is room for one head."""
    kv_heads, head_dim, layers = get(layer + KV_HEADS), get(layer + HEAD_DIM), get(layer + LAYERS)
    heads = kv_heads * get(layer + GROUP)
    flat = narrow(get(layer + POOL))
    piece = get(layer + BLOCK_TOKENS) * head_dim
    at, angle = row * (heads + 2 * kv_heads) * head_dim, row * head_dim
    first = (slot_blocks[row] * layers + get(layer + LAYER)) * 2 * kv_heads
    for head in range(kv_heads):
        slot = (first + head) * piece + slot_offsets[row] * head_dim
        rotate(qkv, at + (heads + head) * head_dim, cos, sin, angle, head_dim, turned, 0)
        narrowed(turned, 0, head_dim, flat, slot)
        _copied(qkv, at + (heads + kv_heads + head) * head_dim, head_dim, flat, slot + kv_heads * piece)


@thread_entry
def write_rows(record: int) -> None:
    """Rotate k of rows and write k and v into the pool, which it mutates.

    Words: addresses of qkv, bfloat16 [rows, (heads + 2 kv_heads) head_dim], and of cos and sin, bfloat16 [rows, head_dim]; rows;
    the records of layer and step. heads = kv_heads * group.
    """
    qkv, cos, sin = narrow(get(record + 8)), narrow(get(record + 16)), narrow(get(record + 24))
    rows, layer, step = get(record + 32), get(record + 40), get(record + 48)
    slots, offsets = (
        carray(whole_at(get(step + SLOT_BLOCKS)), (rows,)),
        carray(whole_at(get(step + SLOT_OFFSETS)), (rows,)),
    )
    turned = np.empty(get(layer + HEAD_DIM), np.float32)
    while True:
        first = fetch_add(record, _ROWS)
        if first >= rows:
            break
        for row in range(first, min(first + _ROWS, rows)):
            _write_row(row, qkv, cos, sin, layer, slots, offsets, turned)


@thread_entry
def attend_rows(record: int) -> None:
    """Attend for rows [0, rows), whose own k and v are written already.

    Words as in `write_rows`; then the address of out, bfloat16 [rows, heads head_dim], and in how many parts, each some of the KV
    heads, a row is computed.
    """
    qkv, cos, sin = narrow(get(record + 8)), narrow(get(record + 16)), narrow(get(record + 24))
    rows, layer, step = get(record + 32), get(record + 40), get(record + 48)
    out, parts = narrow(get(record + 56)), get(record + 64)
    kv_heads, head_dim, group = get(layer + KV_HEADS), get(layer + HEAD_DIM), get(layer + GROUP)
    shape = (get(layer + BLOCKS), get(layer + LAYERS), 2, kv_heads, get(layer + BLOCK_TOKENS), head_dim)
    pool = carray(narrow_at(get(layer + POOL)), shape)
    tables = carray(whole_at(get(step + TABLES)), (rows, get(step + TABLE_WIDTH)))
    lengths = carray(whole_at(get(step + LENGTHS)), (rows,))
    scale, window, softcap = float_of(get(layer + SCALE)), get(layer + WINDOW), float_of(get(layer + SOFTCAP))
    heads = kv_heads * group
    queries = np.empty((1, heads, head_dim), np.float32)
    attended = np.empty((1, heads, head_dim), np.float32)
    flat_queries, flat_attended = queries.reshape(queries.size), attended.reshape(attended.size)
    while True:
        task = fetch_add(record, 1)
        if task >= rows * parts:
            break
        row, part = task // parts, task % parts
        first_head, last_head = kv_heads * part // parts, kv_heads * (part + 1) // parts
        first, count = first_head * group, (last_head - first_head) * group
        at, angle = row * (heads + 2 * kv_heads) * head_dim, row * head_dim
        for head in range(first, first + count):
            rotate(qkv, at + head * head_dim, cos, sin, angle, head_dim, flat_queries, head * head_dim)
        attend_bfloat16(
            0,
            first_head,
            last_head,
            queries,
            pool,
            get(layer + LAYER),
            tables[row : row + 1],
            lengths[row : row + 1],
            scale,
            window,
            softcap,
            attended,
        )
        narrowed(flat_attended, first * head_dim, count * head_dim, out, (row * heads + first) * head_dim)


@thread_entry
def prompt_rows(record: int) -> None:
    """Rotate and write rows [first, first + count), and lay them out by heads. Mutates the pool.

    Words: those of `write_rows`, with `first` in place of rows; then count, room >= count, and the addresses of queries, bfloat16
    [heads, room, head_dim], and of keys and values, bfloat16 [2, kv_heads, room, head_dim], or 0.
    """
    qkv, cos, sin = narrow(get(record + 8)), narrow(get(record + 16)), narrow(get(record + 24))
    start, layer, step = get(record + 32), get(record + 40), get(record + 48)
    count, room, keys_values = get(record + 56), get(record + 64), get(record + 80)
    by_head, both = narrow(get(record + 72)), narrow(keys_values)
    kv_heads, head_dim = get(layer + KV_HEADS), get(layer + HEAD_DIM)
    heads = kv_heads * get(layer + GROUP)
    end = start + count
    slots, offsets = (
        carray(whole_at(get(step + SLOT_BLOCKS)), (end,)),
        carray(whole_at(get(step + SLOT_OFFSETS)), (end,)),
    )
    turned = np.empty(head_dim, np.float32)
    while True:
        first = fetch_add(record, _ROWS)
        if first >= count:
            break
        for n in range(first, min(first + _ROWS, count)):
            row = start + n
            at, angle = row * (heads + 2 * kv_heads) * head_dim, row * head_dim
            for head in range(heads):
                rotate(qkv, at + head * head_dim, cos, sin, angle, head_dim, turned, 0)
                narrowed(turned, 0, head_dim, by_head, (head * room + n) * head_dim)
            _write_row(row, qkv, cos, sin, layer, slots, offsets, turned)
            if keys_values:
                for head in range(kv_heads):
                    key, to = at + (heads + head) * head_dim, (head * room + n) * head_dim
                    rotate(qkv, key, cos, sin, angle, head_dim, turned, 0)
                    narrowed(turned, 0, head_dim, both, to)
                    _copied(qkv, key + kv_heads * head_dim, head_dim, both, kv_heads * room * head_dim + to)
