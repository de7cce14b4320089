"""Vectors of 16 float32 for numba kernels: loading, arithmetic, exp, dot products, to and from bfloat16, prefetching.

Spelt out for LLVM as intrinsics, so that it does not depend on what LLVM's vectoriser makes of loops whose length it does not
know; where the CPU has shorter registers LLVM splits them.

exp is Cephes' expf: range reduction by ln 2 in two parts, a polynomial, the exponent put together from bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

TILE = 16
HIDDEN = np.float32(-1e30)
POWER = (0.05500893094807431, 0.24221096380484797, 0.693282927456603, 1.0)
"""Of 2^x from -0.5 to 0.5, highest power first: of those of that degree that are 1 at 0, the one with the least error."""
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, TILE)
_INTS = ir.VectorType(ir.IntType(32), TILE)
_SHORTS = ir.VectorType(ir.IntType(16), TILE)


class Lanes(types.Type):  # type: ignore[misc]
    """Sixteen float32 in compiled code."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _all(builder: Any, value: Any) -> Any:
    """A vector of 16 times `value`."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * TILE))


def _const(value: float) -> Any:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * TILE)


def _call(builder: Any, name: str, *args: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(args[-1].type, [arg.type for arg in args]), name
    )
    return builder.call(function, args)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", a, b, c)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _load(builder: Any, pointer: Any) -> Any:
    load = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
    load.align = 4
    return load


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer())).align = 4


def _exp(builder: Any, x: Any) -> Any:
    """exp of 16 float32, within 1e-6 relative between -87 and 88; 0 below, exp(88) above; NaN stays NaN."""
    low, high = _const(-87.0), _const(88.0)
    under = builder.fcmp_ordered("<", x, low)
    x = builder.select(under, low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    # 1.5 * 2^23 pushes the fraction out: the low bits of `shifted` are the integer n nearest to x / ln 2.
    magic = _const(12582912.0)
    shifted = _fma(builder, x, _const(1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    rest = _fma(builder, n, _const(-0.693359375), x)
    rest = _fma(builder, n, _const(2.12194440e-4), rest)
    total = _const(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0):
        total = _fma(builder, total, rest, _const(factor))
    bits = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * TILE))
    power = builder.bitcast(builder.add(bits, ir.Constant(_INTS, [127 << 23] * TILE)), _VECTOR)
    return builder.select(under, _const(0.0), builder.fmul(total, power))


def _power(builder: Any, x: Any) -> Any:
    """2 to the power x, up to 127, within 2^-13 relative, for what becomes bfloat16 anyway; of 0 it is 1.

    2^-126 below -126; NaN stays NaN.
    """
    low, magic = _const(-126.0), _const(12582912.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    shifted = builder.fadd(x, magic)  # see `_exp`
    rest = builder.fsub(x, builder.fsub(shifted, magic))
    value = _const(POWER[0])
    for factor in POWER[1:]:
        value = _fma(builder, value, rest, _const(factor))
    exponent = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * TILE))
    return builder.bitcast(builder.add(builder.bitcast(value, _INTS), exponent), _VECTOR)


def _rounded(builder: Any, value: Any) -> Any:
    """The bits of 16 float32 whose high halves are the nearest bfloat16, ties to even."""
    bits = builder.bitcast(value, _INTS)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_INTS, [16] * TILE)), ir.Constant(_INTS, [1] * TILE))
    return builder.add(builder.add(bits, ir.Constant(_INTS, [0x7FFF] * TILE)), odd)


def _prefetch(builder: Any, pointer: Any) -> None:
    pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    word = ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word]), "llvm.prefetch.p0"
    )
    builder.call(function, [pointer, word(0), word(2), word(1)])


def _add_lanes(builder: Any, rows: list[Any]) -> Any:
    """Lane r: the sum of the lanes of rows[r]. Each round halves the rows and packs two partial sums side by side."""
    for step in (8, 4, 2, 1):
        here = [lane // (2 * step) * 2 * step + lane % step + lane // step % 2 * TILE for lane in range(TILE)]
        there = [lane + step for lane in here]
        rows = [
            builder.fadd(
                builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(_INTS, here)),
                builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(_INTS, there)),
            )
            for i in range(step)
        ]
    return rows[0]


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
def load(typing: Any, array: Any, index: Any) -> Any:
    """Elements [index, index + 16) of a float32 array."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, _pointer(context, builder, signature.args[0], *args))

    return _lanes(array, types.int64), emit


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write elements [index, index + 16) of a float32 array."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[2], _pointer(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64, _lanes), emit


@intrinsic
def load_narrow(typing: Any, array: Any, index: Any) -> Any:
    """Elements [index, index + 16) of a flat array of bfloat16 bits (uint16)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *args)
        bits = builder.load(builder.bitcast(pointer, _SHORTS.as_pointer()))
        bits.align = 2
        whole = builder.shl(builder.zext(bits, _INTS), ir.Constant(_INTS, [16] * TILE))
        return builder.bitcast(whole, _VECTOR)

    return _lanes(array, types.int64), emit


@intrinsic
def store_narrow(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write elements [index, index + 16) of a flat array of bfloat16 bits (uint16): the nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        rounded = _rounded(builder, args[2])
        short = builder.trunc(builder.lshr(rounded, ir.Constant(_INTS, [16] * TILE)), _SHORTS)
        builder.store(short, builder.bitcast(pointer, _SHORTS.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(array, types.int64, _lanes), emit


@intrinsic
def store_pairs(typing: Any, array: Any, index: Any, low: Any, high: Any) -> Any:
    """Write 16 pairs of bfloat16 to a flat array of bfloat16 bits (uint16) from `index`: of `low` and of `high`.

    The nearest; of ties the one further from 0, which is two operations less each.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        tie = ir.Constant(_INTS, [0x8000] * TILE)
        low, high = (builder.add(builder.bitcast(value, _INTS), tie) for value in args[2:])
        half = ir.Constant(_INTS, [16] * TILE)
        both = builder.or_(builder.lshr(low, half), builder.and_(high, ir.Constant(_INTS, [-65536] * TILE)))
        builder.store(both, builder.bitcast(pointer, _INTS.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(array, types.int64, _lanes, _lanes), emit


@intrinsic
def transpose(typing: Any, array: Any, index: Any) -> Any:
    """Exchange rows and columns of the 16 by 16 float32, or any words of 32 bits, of a flat array from `index`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [
            builder.gep(_pointer(context, builder, signature.args[0], *args), [ir.IntType(64)(TILE * row)])
            for row in range(TILE)
        ]
        rows = [_load(builder, place) for place in places]
        for step in (8, 4, 2, 1):
            near = [lane if not lane & step else TILE + lane - step for lane in range(TILE)]
            far = [lane + step if not lane & step else TILE + lane for lane in range(TILE)]
            for row in (row for row in range(TILE) if not row & step):
                pair = rows[row], rows[row + step]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(_INTS, near))
                rows[row + step] = builder.shuffle_vector(*pair, ir.Constant(_INTS, far))
        for place, row in zip(places, rows, strict=True):
            _store(builder, row, place)
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


@intrinsic
def narrow_at(typing: Any, address: Any) -> Any:
    """The address of bfloat16 bits as what `carray` takes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(16).as_pointer())

    return types.CPointer(types.uint16)(types.int64), emit


_FAR = 1 << 46
"""A length for arrays that are made of an address alone; nothing looks at it."""


@njit
def narrow(address: int) -> Any:
    """The bfloat16 bits at `address` as a flat array, however many there are."""
    return carray(narrow_at(address), (_FAR,))


@intrinsic
def float_at(typing: Any, address: Any) -> Any:
    """The address of float32 as what `carray` takes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), emit


@intrinsic
def whole_at(typing: Any, address: Any) -> Any:
    """The address of int64 as what `carray` takes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), emit


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The float32 with these bits: entries are called with integers only."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), _FLOAT)

    return types.float32(types.int64), emit


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """The sum of 16, always in the same order."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        for step in (8, 4, 2, 1):
            other = builder.shuffle_vector(value, value, ir.Constant(_INTS, [lane ^ step for lane in range(TILE)]))
            value = builder.fadd(value, other)
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.float32(_lanes), emit


@intrinsic
def silu(typing: Any, x: Any) -> Any:
    """x / (1 + exp(-x)), for what becomes bfloat16 anyway. What is below -87 counts as that: nothing is left of it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        least = _const(-87.0)
        x = builder.select(builder.fcmp_ordered("<", args[0], least), least, args[0])
        power = _power(builder, builder.fmul(x, _const(-1.4426950408889634)))
        return builder.fdiv(x, builder.fadd(_const(1.0), power))

    return _lanes(_lanes), emit


@intrinsic
def fill(typing: Any, value: Any) -> Any:
    """Sixteen times `value`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _all(builder, args[0])

    return _lanes(types.float32), emit


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fma(builder, *args)

    return _lanes(_lanes, _lanes, _lanes), emit


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """See `_exp`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _exp(builder, args[0])

    return _lanes(_lanes), emit


@intrinsic
def power(typing: Any, x: Any) -> Any:
    """See `_power`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _power(builder, args[0])

    return _lanes(_lanes), emit


@intrinsic
def bounded(typing: Any, x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap), from tanh(y) = 1 - 2 / (exp(2 y) + 1)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cap = _all(builder, args[1])
        power = _exp(builder, builder.fdiv(builder.fadd(args[0], args[0]), cap))
        tail = builder.fdiv(_const(2.0), builder.fadd(power, _const(1.0)))
        return builder.fmul(cap, builder.fsub(_const(1.0), tail))

    return _lanes(_lanes, types.float32), emit


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger in each lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return _lanes(_lanes, _lanes), emit


@intrinsic
def highest(typing: Any, x: Any) -> Any:
    """The highest of 16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        for step in (8, 4, 2, 1):
            other = builder.shuffle_vector(value, value, ir.Constant(_INTS, [lane ^ step for lane in range(TILE)]))
            value = builder.select(builder.fcmp_ordered(">", other, value), other, value)
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.float32(_lanes), emit


@intrinsic
def keep(typing: Any, x: Any, low: Any, high: Any, other: Any) -> Any:
    """Lanes [low, high) of `x`, `other` elsewhere."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane = _const(0.0)
        for index in range(TILE):
            lane = builder.insert_element(lane, ir.Constant(_FLOAT, float(index)), ir.IntType(32)(index))
        low, high = (_all(builder, builder.sitofp(bound, _FLOAT)) for bound in args[1:3])
        inside = builder.and_(builder.fcmp_ordered(">=", lane, low), builder.fcmp_ordered("<", lane, high))
        return builder.select(inside, args[0], _all(builder, args[3]))

    return _lanes(_lanes, types.int64, types.int64, types.float32), emit


@intrinsic
def dots(typing: Any, space: Any, query: Any, tile: Any, width: Any) -> Any:
    """Lane r: the `width` elements of `space` from `query` times row r of the [16, width] tile from `tile`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        space, query, tile, width = args
        integer = width.type
        result = cgutils.alloca_once(builder, _VECTOR)

        def sweep(width: Any) -> None:
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(TILE)]
            for slot in sums:
                builder.store(_const(0.0), slot)
            with cgutils.for_range_slice(builder, integer(0), width, integer(TILE), integer) as (column, _):
                factor = _load(
                    builder, _pointer(context, builder, signature.args[0], space, builder.add(query, column))
                )
                pointer = _pointer(context, builder, signature.args[0], space, builder.add(tile, column))
                for row, slot in enumerate(sums):
                    place = builder.gep(pointer, [builder.mul(width, integer(row))])
                    builder.store(_fma(builder, factor, _load(builder, place), builder.load(slot)), slot)
            builder.store(_add_lanes(builder, [builder.load(slot) for slot in sums]), result)

        _by_width(builder, width, sweep)
        return builder.load(result)

    return _lanes(space, types.int64, types.int64, types.int64), emit


@intrinsic
def add_rows(typing: Any, space: Any, weights: Any, tile: Any, width: Any, sums: Any, group: Any) -> Any:
    """sums += weights @ tile, all in `space` from those indices: [group, width], [group, 16], [16, width]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        space, weights, tile, width, sums, group = args
        integer = width.type

        def sweep(width: Any) -> None:
            with cgutils.for_range_slice(builder, integer(0), width, integer(TILE), integer) as (column, _):
                pointer = _pointer(context, builder, signature.args[0], space, builder.add(tile, column))
                rows = [_load(builder, builder.gep(pointer, [builder.mul(width, integer(row))])) for row in range(TILE)]
                with cgutils.for_range(builder, group, intp=integer) as loop:
                    place = builder.add(sums, builder.add(builder.mul(loop.index, width), column))
                    target = _pointer(context, builder, signature.args[0], space, place)
                    first = builder.add(weights, builder.mul(loop.index, integer(TILE)))
                    weight = _pointer(context, builder, signature.args[0], space, first)
                    parts = [_load(builder, target), _const(0.0), _const(0.0), _const(0.0)]
                    for row in range(TILE):
                        factor = _all(builder, builder.load(builder.gep(weight, [integer(row)])))
                        parts[row % 4] = _fma(builder, factor, rows[row], parts[row % 4])
                    total = builder.fadd(builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3]))
                    _store(builder, total, target)

        _by_width(builder, width, sweep)
        return context.get_dummy_value()

    return types.void(space, *[types.int64] * 5), emit


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of a flat array's element, into the second-level cache."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, _pointer(context, builder, signature.args[0], *args))
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


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
            value = builder.bitcast(builder.shl(builder.zext(value, whole), half), shape(_FLOAT))
        builder.store(value, builder.bitcast(target, shape(_FLOAT).as_pointer())).align = 4

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _pointer(context, builder, signature.args[0], args[0], args[1])
        target = _pointer(context, builder, signature.args[3], args[3], args[4])
        count = args[2]
        first = count.type(0)
        for lanes in (64, 16, 1):
            last = builder.and_(count, count.type(-lanes))
            with cgutils.for_range_slice(builder, first, last, count.type(lanes), count.type) as (index, _):
                copy(builder, builder.gep(source, [index]), builder.gep(target, [index]), lanes)
            first = last
        return context.get_dummy_value()

    return types.void(flat, types.int64, types.int64, tile, types.int64), emit


def panel_sums(rows: int, ahead: int) -> Any:
    """Returns an intrinsic for so many rows: their products with 32 outputs of a weight in bfloat16.

    It takes addresses and numbers: of the rows, float32, and the bytes from one to the next; of the panel, for each pair of
    inputs the pair of every output (64 bfloat16); how many pairs; and of the sums, float32 [rows, 32], which it writes. The
    panel is asked for `ahead` bytes before it is needed.
    """
    word, line = ir.IntType(64), 64
    chains = 2 if rows <= 2 else 1  # of additions, which wait for each other: at least four

    @intrinsic
    def sums(typing: Any, x: Any, stride: Any, panel: Any, pairs: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, panel, pairs, out = args
            starts = [builder.add(x, builder.mul(stride, word(row))) for row in range(rows)]
            slots = {
                (row, half, chain): cgutils.alloca_once(builder, _VECTOR)
                for row in range(rows)
                for half in range(2)
                for chain in range(chains)
            }
            for slot in slots.values():
                builder.store(_const(0.0), slot)
            with cgutils.for_range(builder, pairs, intp=word) as loop:
                at = builder.add(panel, builder.mul(loop.index, word(2 * line)))
                weights = builder.inttoptr(at, _INTS.as_pointer())
                factors = []
                for start in starts:
                    pair = builder.inttoptr(builder.add(start, builder.mul(loop.index, word(8))), _FLOAT.as_pointer())
                    factors.append([_all(builder, builder.load(builder.gep(pair, [word(i)]))) for i in range(2)])
                for half in range(2):
                    _prefetch(
                        builder, builder.inttoptr(builder.add(at, word(ahead + half * line)), _VECTOR.as_pointer())
                    )
                    both = builder.load(builder.gep(weights, [word(half)]))
                    both.align = 4
                    first = builder.shl(both, ir.Constant(_INTS, [16] * TILE))
                    second = builder.and_(both, ir.Constant(_INTS, [-65536] * TILE))
                    for which, weight in enumerate((first, second)):
                        for row in range(rows):
                            slot = slots[row, half, which % chains]
                            value = _fma(
                                builder, builder.bitcast(weight, _VECTOR), factors[row][which], builder.load(slot)
                            )
                            builder.store(value, slot)
            target = builder.inttoptr(out, _VECTOR.as_pointer())
            for row in range(rows):
                for half in range(2):
                    value = builder.load(slots[row, half, 0])
                    if chains == 2:
                        value = builder.fadd(value, builder.load(slots[row, half, 1]))
                    _store(builder, value, builder.gep(target, [word(2 * row + half)]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return sums
