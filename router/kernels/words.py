"""Small words by their address, and asking for memory ahead of its use, in numba functions.

Continues `kvpool/kernels/atomics.py` for memory that only this process has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_SHORT = ir.IntType(16)


def _get_short(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _SHORT.as_pointer())
        return builder.zext(builder.load(place), _WORD)

    return types.int64(types.int64), generate


get_short: Callable[[int], int] = intrinsic(_get_short)
"""The 16-bit word at `address`, as a number from 0 on."""


def _put_short(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _SHORT.as_pointer())
        builder.store(builder.trunc(arguments[1], _SHORT), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


put_short: Callable[[int, int], None] = intrinsic(_put_short)
"""Writes the 16-bit word at `address`."""


def _prefetch(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = builder.inttoptr(arguments[0], byte)
        builder.call(function, [place, flag(0), flag(3), flag(1)])  # to read, keep in all caches, data
        return context.get_dummy_value()

    return types.void(types.int64), generate


prefetch: Callable[[int], None] = intrinsic(_prefetch)
"""Begins to fetch the cache line of `address`, and does not wait for it. Any address is harmless."""
