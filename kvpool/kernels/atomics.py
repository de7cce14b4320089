"""Reading and writing words by their address, atomically, in numba functions.

Addresses and values are int64; a word is 8-byte aligned. Atomic operations are sequentially consistent, and atomic
between processes as well, because x86 and ARM lock the line, not the mapping. `get`/`put` are plain accesses, for
memory of this process and for words that only their owner writes: the compiler may move those, though not across an
atomic operation.

Limits: 64 bits (tag and value are packed into one word; there is no 128-bit compare-and-swap here).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_HALF = ir.IntType(32)
_ORDER = "seq_cst"


def _pointer(builder: Any, address: Any, kind: Any = _WORD) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def _load(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), _ORDER, 8)

    return types.int64(types.int64), generate


load: Callable[[int], int] = _load
"""The word at `address`, atomically."""


@intrinsic
def _store(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


store: Callable[[int, int], None] = _store
"""Writes the word at `address`, atomically."""


@intrinsic
def _swap_if(context: Any, address: Any, expected: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = builder.cmpxchg(_pointer(builder, arguments[0]), arguments[1], arguments[2], _ORDER, _ORDER)
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


swap_if: Callable[[int, int, int], bool] = _swap_if
"""Compare-and-swap: writes `value` where `expected` stands; whether it did."""


def _read_modify_write(operation: str) -> Any:
    def typing(context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.atomic_rmw(operation, _pointer(builder, arguments[0]), arguments[1], _ORDER)

        return types.int64(types.int64, types.int64), generate

    return intrinsic(typing)


fetch_or: Callable[[int, int], int] = _read_modify_write("or")
"""Sets bits; the word before."""
fetch_and: Callable[[int, int], int] = _read_modify_write("and")
"""Clears the bits that are 0 in the value; the word before."""
fetch_add: Callable[[int, int], int] = _read_modify_write("add")
"""Adds; the word before."""


@intrinsic
def _get(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0]))

    return types.int64(types.int64), generate


get: Callable[[int], int] = _get
"""The word at `address`, plainly."""


@intrinsic
def _put(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


put: Callable[[int, int], None] = _put
"""Writes the word at `address`, plainly."""


@intrinsic
def _get_half(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load(_pointer(builder, arguments[0], _HALF)), _WORD)

    return types.int64(types.int64), generate


get_half: Callable[[int], int] = _get_half
"""The 32-bit word at `address`, plainly, as a number from 0 on."""


@intrinsic
def _put_half(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(builder.trunc(arguments[1], _HALF), _pointer(builder, arguments[0], _HALF))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


put_half: Callable[[int, int], None] = _put_half
"""Writes the 32-bit word at `address`, plainly."""


@intrinsic
def _lowest_bit(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


lowest_bit: Callable[[int], int] = _lowest_bit
"""The number of the lowest bit that is set; `value` is not 0."""


@intrinsic
def _highest_bit(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(_WORD, 63), zeros)

    return types.int64(types.int64), generate


highest_bit: Callable[[int], int] = _highest_bit
"""The number of the highest bit that is set; `value` is not 0."""


@intrinsic
def _count_bits(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


count_bits: Callable[[int], int] = _count_bits
"""How many bits are set."""
