"""The products of decode attention on vectors (`lanes.py`): scores of a tile of 16 tokens, and what their values add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from actors.lanes import (
    FLOAT,
    LANES,
    TILE,
    VECTOR,
    constant,
    emit_all,
    emit_fma,
    emit_load,
    emit_place,
    emit_store,
)


def add_lanes(builder: Any, rows: list[Any]) -> Any:
    """Lane r: the sum of the lanes of rows[r], of as many lanes as rows.

    Each round halves the rows and packs two partial sums side by side.
    """
    lanes = len(rows)
    step = lanes // 2
    while step:
        here = [lane // (2 * step) * 2 * step + lane % step + lane // step % 2 * lanes for lane in range(lanes)]
        first, second = (_lanes_of(where) for where in (here, [lane + step for lane in here]))
        rows = [
            builder.fadd(
                builder.shuffle_vector(rows[i], rows[i + step], first),
                builder.shuffle_vector(rows[i], rows[i + step], second),
            )
            for i in range(step)
        ]
        step //= 2
    return rows[0]


def _lanes_of(places: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)


def _by_width(builder: Any, width: Any, sweep: Callable[[Any], None], usual: tuple[int, ...] = (64, 128)) -> None:
    """Emit sweep(width), with code of its own for the usual widths: known offsets spare the pointer arithmetic."""
    if not usual:
        sweep(width)
        return
    known = width.type(usual[0])
    with builder.if_else(builder.icmp_signed("==", width, known)) as (then, other):
        with then:
            sweep(known)
        with other:
            _by_width(builder, width, sweep, usual[1:])


@intrinsic
def dots(typing: Any, space: Any, query: Any, tile: Any, width: Any) -> Any:
    """Lane r: the `width` elements of `space` from `query` times row r of the [16, width] tile from `tile`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        space, query, tile, width = args
        integer = width.type
        result = cgutils.alloca_once(builder, VECTOR)

        def sweep(width: Any) -> None:
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(TILE)]
            for slot in sums:
                builder.store(constant(0.0), slot)
            with cgutils.for_range_slice(builder, integer(0), width, integer(TILE), integer) as (column, _):
                factor = emit_load(
                    builder, emit_place(context, builder, signature.args[0], space, builder.add(query, column))
                )
                pointer = emit_place(context, builder, signature.args[0], space, builder.add(tile, column))
                for row, slot in enumerate(sums):
                    place = builder.gep(pointer, [builder.mul(width, integer(row))])
                    builder.store(emit_fma(builder, factor, emit_load(builder, place), builder.load(slot)), slot)
            builder.store(add_lanes(builder, [builder.load(slot) for slot in sums]), result)

        _by_width(builder, width, sweep)
        return builder.load(result)

    return LANES(space, types.int64, types.int64, types.int64), emit


@intrinsic
def add_rows(typing: Any, space: Any, weights: Any, tile: Any, width: Any, sums: Any, group: Any) -> Any:
    """sums += weights @ tile, all in `space` from those indices: [group, width], [group, 16], [16, width]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        space, weights, tile, width, sums, group = args
        integer = width.type

        def sweep(width: Any) -> None:
            with cgutils.for_range_slice(builder, integer(0), width, integer(TILE), integer) as (column, _):
                pointer = emit_place(context, builder, signature.args[0], space, builder.add(tile, column))
                rows = [
                    emit_load(builder, builder.gep(pointer, [builder.mul(width, integer(row))])) for row in range(TILE)
                ]
                with cgutils.for_range(builder, group, intp=integer) as loop:
                    place = builder.add(sums, builder.add(builder.mul(loop.index, width), column))
                    target = emit_place(context, builder, signature.args[0], space, place)
                    first = builder.add(weights, builder.mul(loop.index, integer(TILE)))
                    weight = emit_place(context, builder, signature.args[0], space, first)
                    parts = [emit_load(builder, target), constant(0.0), constant(0.0), constant(0.0)]
                    for row in range(TILE):
                        factor = emit_all(builder, builder.load(builder.gep(weight, [integer(row)])))
                        parts[row % 4] = emit_fma(builder, factor, rows[row], parts[row % 4])
                    total = builder.fadd(builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3]))
                    emit_store(builder, total, target)

        _by_width(builder, width, sweep)
        return context.get_dummy_value()

    return types.void(space, *[types.int64] * 5), emit


@intrinsic
def widen(typing: Any, flat: Any, at: Any, count: Any, tile: Any, to: Any) -> Any:
    """Copy `count` elements of `flat` (float32, or bfloat16 bits as uint16) from `at` into the float32 `tile` from `to`."""
    narrow = flat.dtype == types.uint16

    def copy(builder: Any, source: Any, target: Any, lanes: int) -> None:
        def shape(kind: Any) -> Any:
            return ir.VectorType(kind, lanes) if lanes > 1 else kind

        element = source.type.pointee
        value = builder.load(builder.bitcast(source, shape(element).as_pointer()))
        value.align = 2 if narrow else 4
        if narrow:
            whole = shape(ir.IntType(32))
            half = ir.Constant(whole, [16] * lanes if lanes > 1 else 16)
            value = builder.bitcast(builder.shl(builder.zext(value, whole), half), shape(FLOAT))
        builder.store(value, builder.bitcast(target, shape(FLOAT).as_pointer())).align = 4

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = emit_place(context, builder, signature.args[0], args[0], args[1])
        target = emit_place(context, builder, signature.args[3], args[3], args[4])
        count = args[2]
        first = count.type(0)
        for lanes in (64, 16, 1):
            last = builder.and_(count, count.type(-lanes))
            with cgutils.for_range_slice(builder, first, last, count.type(lanes), count.type) as (index, _):
                copy(builder, builder.gep(source, [index]), builder.gep(target, [index]), lanes)
            first = last
        return context.get_dummy_value()

    return types.void(flat, types.int64, types.int64, tile, types.int64), emit
