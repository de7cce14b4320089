"""Vectors of 16 float32 for numba kernels: loading, arithmetic, exp, to and from bfloat16, prefetching.

Spelt out for LLVM as intrinsics, so that it does not depend on what LLVM's vectoriser makes of loops whose length it does not
know; where the CPU has shorter registers LLVM splits them.

exp is Cephes' expf: range reduction by ln 2 in two parts, a polynomial, the exponent put together from bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

TILE = 16
WIDE: Final = bool(binding.get_host_cpu_features().get("avx512f"))
"""Whether a register holds 16 float32, and there are 32 of them; else it takes two of 16, as on AVX2."""
HIDDEN = np.float32(-1e30)
POWER = (0.05500893094807431, 0.24221096380484797, 0.693282927456603, 1.0)
"""Of 2^x from -0.5 to 0.5, highest power first: of those of that degree that are 1 at 0, the one with the least error."""
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, TILE)
INTS = ir.VectorType(ir.IntType(32), TILE)
_SHORTS = ir.VectorType(ir.IntType(16), TILE)


class Lanes(types.Type):  # type: ignore[misc]
    """Sixteen float32 in compiled code."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def emit_all(builder: Any, value: Any) -> Any:
    """A vector of 16 times `value`."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * TILE))


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [float(np.float32(value))] * TILE)


def _call(builder: Any, name: str, *args: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(args[-1].type, [arg.type for arg in args]), name
    )
    return builder.call(function, args)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", a, b, c)


def emit_place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def emit_load(builder: Any, pointer: Any) -> Any:
    load = builder.load(builder.bitcast(pointer, VECTOR.as_pointer()))
    load.align = 4
    return load


def emit_store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer())).align = 4


def _exp(builder: Any, x: Any) -> Any:
    """exp of 16 float32, within 1e-6 relative between -87 and 88; 0 below, exp(88) above; NaN stays NaN."""
    low, high = constant(-87.0), constant(88.0)
    under = builder.fcmp_ordered("<", x, low)
    x = builder.select(under, low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    # 1.5 * 2^23 pushes the fraction out: the low bits of `shifted` are the integer n nearest to x / ln 2.
    magic = constant(12582912.0)
    shifted = emit_fma(builder, x, constant(1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    rest = emit_fma(builder, n, constant(-0.693359375), x)
    rest = emit_fma(builder, n, constant(2.12194440e-4), rest)
    total = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0):
        total = emit_fma(builder, total, rest, constant(factor))
    bits = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * TILE))
    power = builder.bitcast(builder.add(bits, ir.Constant(INTS, [127 << 23] * TILE)), VECTOR)
    return builder.select(under, constant(0.0), builder.fmul(total, power))


def _power(builder: Any, x: Any) -> Any:
    """2 to the power x, up to 127, within 2^-13 relative, for what becomes bfloat16 anyway; of 0 it is 1.

    2^-126 below -126; NaN stays NaN.
    """
    low, magic = constant(-126.0), constant(12582912.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    shifted = builder.fadd(x, magic)  # see `_exp`
    rest = builder.fsub(x, builder.fsub(shifted, magic))
    value = constant(POWER[0])
    for factor in POWER[1:]:
        value = emit_fma(builder, value, rest, constant(factor))
    exponent = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * TILE))
    return builder.bitcast(builder.add(builder.bitcast(value, INTS), exponent), VECTOR)


def _rounded(builder: Any, value: Any) -> Any:
    """The bits of 16 float32 whose high halves are the nearest bfloat16, ties to even."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ir.Constant(INTS, [16] * TILE)), ir.Constant(INTS, [1] * TILE))
    return builder.add(builder.add(bits, ir.Constant(INTS, [0x7FFF] * TILE)), odd)


def emit_prefetch(builder: Any, pointer: Any) -> None:
    pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    word = ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word]), "llvm.prefetch.p0"
    )
    builder.call(function, [pointer, word(0), word(2), word(1)])


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """Elements [index, index + 16) of a float32 array."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, emit_place(context, builder, signature.args[0], *args))

    return LANES(array, types.int64), emit


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write elements [index, index + 16) of a float32 array."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, args[2], emit_place(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64, LANES), emit


@intrinsic
def load_narrow(typing: Any, array: Any, index: Any) -> Any:
    """Elements [index, index + 16) of a flat array of bfloat16 bits (uint16)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = emit_place(context, builder, signature.args[0], *args)
        bits = builder.load(builder.bitcast(pointer, _SHORTS.as_pointer()))
        bits.align = 2
        whole = builder.shl(builder.zext(bits, INTS), ir.Constant(INTS, [16] * TILE))
        return builder.bitcast(whole, VECTOR)

    return LANES(array, types.int64), emit


@intrinsic
def store_narrow(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write elements [index, index + 16) of a flat array of bfloat16 bits (uint16): the nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = emit_place(context, builder, signature.args[0], args[0], args[1])
        rounded = _rounded(builder, args[2])
        short = builder.trunc(builder.lshr(rounded, ir.Constant(INTS, [16] * TILE)), _SHORTS)
        builder.store(short, builder.bitcast(pointer, _SHORTS.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(array, types.int64, LANES), emit


@intrinsic
def store_pairs(typing: Any, array: Any, index: Any, low: Any, high: Any) -> Any:
    """Write 16 pairs of bfloat16 to a flat array of bfloat16 bits (uint16) from `index`: of `low` and of `high`.

    The nearest; of ties the one further from 0, which is two operations less each.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = emit_place(context, builder, signature.args[0], args[0], args[1])
        tie = ir.Constant(INTS, [0x8000] * TILE)
        low, high = (builder.add(builder.bitcast(value, INTS), tie) for value in args[2:])
        half = ir.Constant(INTS, [16] * TILE)
        both = builder.or_(builder.lshr(low, half), builder.and_(high, ir.Constant(INTS, [-65536] * TILE)))
        builder.store(both, builder.bitcast(pointer, INTS.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(array, types.int64, LANES, LANES), emit


@intrinsic
def transpose(typing: Any, array: Any, index: Any) -> Any:
    """Exchange rows and columns of the 16 by 16 float32, or any words of 32 bits, of a flat array from `index`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = [
            builder.gep(emit_place(context, builder, signature.args[0], *args), [ir.IntType(64)(TILE * row)])
            for row in range(TILE)
        ]
        rows = [emit_load(builder, place) for place in places]
        for step in (8, 4, 2, 1):
            near = [lane if not lane & step else TILE + lane - step for lane in range(TILE)]
            far = [lane + step if not lane & step else TILE + lane for lane in range(TILE)]
            for row in (row for row in range(TILE) if not row & step):
                pair = rows[row], rows[row + step]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(INTS, near))
                rows[row + step] = builder.shuffle_vector(*pair, ir.Constant(INTS, far))
        for place, row in zip(places, rows, strict=True):
            emit_store(builder, row, place)
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
        return builder.inttoptr(args[0], FLOAT.as_pointer())

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
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), FLOAT)

    return types.float32(types.int64), emit


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """The sum of 16, always in the same order."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        for step in (8, 4, 2, 1):
            other = builder.shuffle_vector(value, value, ir.Constant(INTS, [lane ^ step for lane in range(TILE)]))
            value = builder.fadd(value, other)
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.float32(LANES), emit


@intrinsic
def silu(typing: Any, x: Any) -> Any:
    """x / (1 + exp(-x)), for what becomes bfloat16 anyway. What is below -87 counts as that: nothing is left of it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        least = constant(-87.0)
        x = builder.select(builder.fcmp_ordered("<", args[0], least), least, args[0])
        power = _power(builder, builder.fmul(x, constant(-1.4426950408889634)))
        return builder.fdiv(x, builder.fadd(constant(1.0), power))

    return LANES(LANES), emit


@intrinsic
def fill(typing: Any, value: Any) -> Any:
    """Sixteen times `value`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_all(builder, args[0])

    return LANES(types.float32), emit


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fma(builder, *args)

    return LANES(LANES, LANES, LANES), emit


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """See `_exp`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _exp(builder, args[0])

    return LANES(LANES), emit


@intrinsic
def power(typing: Any, x: Any) -> Any:
    """See `_power`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _power(builder, args[0])

    return LANES(LANES), emit


@intrinsic
def bounded(typing: Any, x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap), from tanh(y) = 1 - 2 / (exp(2 y) + 1)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cap = emit_all(builder, args[1])
        power = _exp(builder, builder.fdiv(builder.fadd(args[0], args[0]), cap))
        tail = builder.fdiv(constant(2.0), builder.fadd(power, constant(1.0)))
        return builder.fmul(cap, builder.fsub(constant(1.0), tail))

    return LANES(LANES, types.float32), emit


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger in each lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return LANES(LANES, LANES), emit


@intrinsic
def highest(typing: Any, x: Any) -> Any:
    """The highest of 16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        for step in (8, 4, 2, 1):
            other = builder.shuffle_vector(value, value, ir.Constant(INTS, [lane ^ step for lane in range(TILE)]))
            value = builder.select(builder.fcmp_ordered(">", other, value), other, value)
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.float32(LANES), emit


@intrinsic
def keep(typing: Any, x: Any, low: Any, high: Any, other: Any) -> Any:
    """Lanes [low, high) of `x`, `other` elsewhere."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane = constant(0.0)
        for index in range(TILE):
            lane = builder.insert_element(lane, ir.Constant(FLOAT, float(index)), ir.IntType(32)(index))
        low, high = (emit_all(builder, builder.sitofp(bound, FLOAT)) for bound in args[1:3])
        inside = builder.and_(builder.fcmp_ordered(">=", lane, low), builder.fcmp_ordered("<", lane, high))
        return builder.select(inside, args[0], emit_all(builder, args[3]))

    return LANES(LANES, types.int64, types.int64, types.float32), emit


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of a flat array's element, into the second-level cache."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, emit_place(context, builder, signature.args[0], *args))
        return context.get_dummy_value()

    return types.void(array, types.int64), emit
