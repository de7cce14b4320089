"""Matrix tiles of Intel CPUs (AMX) for numba kernels, in bfloat16: rows times a panel of packed weights, and the two products
of attention.

The tile registers are eight of 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 inputs with 16 outputs of such 32
inputs, so 16 rows cost what one does. Their shape is set for each thread; whatever another library had set is put back
afterwards.

Linux gives tiles to a process that asks for them. Where there are none `supported` says so, and the products must not be
called: they do not even compile.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux,
Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any, Final

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS: Final = 16
"""Of a tile."""
_ARCH_PRCTL: Final = 158
_ARCH_GET_XCOMP_PERM: Final = 0x1022
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_TILE_DATA: Final = 18

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_PLACE = _BYTE.as_pointer()
_PRODUCT = ((0, 1), (2,), (3, 4)), ((0, 1, 3, 4), (2, 5), (6, 7))
"""Which registers hold sums, inputs and weights, for one group of rows and for two; two for two halves of a panel."""
_MIXED, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
"""The same in attention."""
_REGISTERS: Final = 8
_LINE: Final = 64


@functools.cache
def supported() -> bool:
    """Whether this process may use tiles of bfloat16. Asks for them."""
    features = binding.get_host_cpu_features()
    if platform.system() != "Linux" or not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    allowed = ctypes.c_uint64()
    syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA)
    failed = syscall(_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, ctypes.byref(allowed))
    return not failed and bool(allowed.value >> _TILE_DATA & 1)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _at(builder: Any, address: Any, offset: Any = 0) -> Any:
    return builder.inttoptr(builder.add(address, _WORD(offset) if isinstance(offset, int) else offset), _PLACE)


@intrinsic
def begin_tiles(typing: Any, rows: Any, space: Any) -> Any:
    """Set this thread's tiles for `rows` rows, 16 for attention. `space` is the address of 128 bytes, kept for `end_tiles`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, space = args
        _call(builder, "sttilecfg", _at(builder, space, _LINE))
        for place in range(0, _LINE, 8):
            builder.store(_WORD(0), builder.bitcast(_at(builder, space, place), _WORD.as_pointer()))
        builder.store(_BYTE(1), _at(builder, space))  # the palette
        for register in range(_REGISTERS):
            builder.store(_BYTE(_LINE), _at(builder, space, 16 + 2 * register))
            count = builder.trunc(rows, _BYTE) if register <= 2 else _BYTE(16)
            builder.store(count, _at(builder, space, 48 + register))
        _call(builder, "ldtilecfg", _at(builder, space))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def end_tiles(typing: Any, space: Any) -> Any:
    """Put back what was set before `begin_tiles`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        was = builder.load(_at(builder, args[0], _LINE))
        with builder.if_else(builder.icmp_unsigned("==", was, _BYTE(0))) as (then, other):
            with then:
                _call(builder, "tilerelease")
            with other:
                _call(builder, "ldtilecfg", _at(builder, args[0], _LINE))
        return context.get_dummy_value()

    return types.void(types.int64), emit


def tile_sums(groups: int) -> Any:
    """Returns an intrinsic for that many times 16 rows, 1 or 2; of one there may be fewer, as `begin_tiles` was told.

    It computes out := x times a panel of 32 outputs. It takes addresses: of the rows, bfloat16, `stride` bytes apart; of the
    panel, as for `lanes.panel_sums`; and of float32 [rows, 32]. `pairs` of inputs is a multiple of 16. The panel is asked for
    `ahead` bytes before it is needed.
    """
    sums, inputs, weights = _PRODUCT[groups - 1]

    @intrinsic
    def product(typing: Any, x: Any, stride: Any, panel: Any, pairs: Any, out: Any, ahead: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, panel, pairs, out, ahead = args
            for register in sums:
                _call(builder, "tilezero", _BYTE(register))
            word = ir.IntType(32)
            fetch = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [_PLACE, word, word, word]), "llvm.prefetch.p0"
            )
            with cgutils.for_range_slice(builder, _WORD(0), pairs, _WORD(16), _WORD) as (pair, _):
                at = builder.add(panel, builder.mul(pair, _WORD(2 * _LINE)))
                soon = builder.add(at, ahead)
                for place in range(0, 32 * _LINE, _LINE):
                    builder.call(fetch, [_at(builder, soon, place), word(0), word(2), word(1)])
                for half, register in enumerate(weights):
                    _call(builder, "tileloadd64", _BYTE(register), _at(builder, at, half * _LINE), _WORD(2 * _LINE))
                for group, register in enumerate(inputs):
                    row = builder.add(x, builder.mul(stride, _WORD(16 * group)))
                    column = builder.add(row, builder.mul(pair, _WORD(4)))
                    _call(builder, "tileloadd64", _BYTE(register), _at(builder, column), stride)
                    for half, weight in enumerate(weights):
                        _call(builder, "tdpbf16ps", _BYTE(sums[2 * group + half]), _BYTE(register), _BYTE(weight))
            for number, register in enumerate(sums):
                at = _at(builder, out, number // 2 * 32 * _LINE + number % 2 * _LINE)
                _call(builder, "tilestored64", _BYTE(register), at, _WORD(2 * _LINE))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), emit

    return product


@intrinsic
def tile_scores(typing: Any, keys: Any, others: Any, stride: Any, queries: Any, parts: Any, out: Any, step: Any) -> Any:
    """out := 16 keys and 16 others times twice 16 queries.

    Addresses of both keys, bfloat16, `stride` bytes apart; of the queries as tiles, for every 16 queries and for every 32
    elements of a head the pairs [16, queries, 2]; and of float32 [2, keys, queries], for the second 16 queries `step` bytes on.
    `parts`: how many times 32 elements a head has.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *both, stride, queries, parts, out, step = args
        starts = queries, builder.add(queries, builder.mul(parts, _WORD(16 * _LINE)))
        for register in _MIXED:
            _call(builder, "tilezero", _BYTE(register))
        with cgutils.for_range(builder, parts, intp=_WORD) as loop:
            for right, start in zip(_RIGHT, starts, strict=True):
                at = builder.add(start, builder.mul(loop.index, _WORD(16 * _LINE)))
                _call(builder, "tileloadd64", _BYTE(right), _at(builder, at), _WORD(_LINE))
            for half, keys in enumerate(both):
                at = builder.add(keys, builder.mul(loop.index, _WORD(_LINE)))
                _call(builder, "tileloadd64", _BYTE(_LEFT[half]), _at(builder, at), stride)
                for which, right in enumerate(_RIGHT):
                    _call(builder, "tdpbf16ps", _BYTE(_MIXED[2 * which + half]), _BYTE(_LEFT[half]), _BYTE(right))
        for which, start in enumerate((out, builder.add(out, step))):
            for half in range(2):
                at = _at(builder, start, 16 * _LINE * half)
                _call(builder, "tilestored64", _BYTE(_MIXED[2 * which + half]), at, _WORD(_LINE))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


@intrinsic
def tile_mix(
    typing: Any, values: Any, step: Any, weights: Any, weights_step: Any, parts: Any, sums: Any, sums_step: Any
) -> Any:
    """Adds to 32 elements of twice 16 queries what their keys' values come to.

    Addresses of the values as tiles, for every 32 keys the elements [element, 32 keys], `step` bytes from one 32 to the next; of
    the weights, for every 32 keys the pairs [16, queries, 2]; and of the sums, float32 [elements, queries]. Those of the
    second 16 queries come so many bytes later. `parts`: how many times 32 keys.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, step, weights, weights_step, parts, sums, sums_step = args
        places = {
            _MIXED[2 * which + tile]: _at(builder, start, 16 * _LINE * tile)
            for which, start in enumerate((sums, builder.add(sums, sums_step)))
            for tile in range(2)
        }
        for register, place in places.items():
            _call(builder, "tileloadd64", _BYTE(register), place, _WORD(_LINE))
        with cgutils.for_range(builder, parts, intp=_WORD) as loop:
            at = builder.add(weights, builder.mul(loop.index, _WORD(16 * _LINE)))
            for right, start in zip(_RIGHT, (at, builder.add(at, weights_step)), strict=True):
                _call(builder, "tileloadd64", _BYTE(right), _at(builder, start), _WORD(_LINE))
            at = builder.add(values, builder.mul(loop.index, step))
            for tile, left in enumerate(_LEFT):
                _call(builder, "tileloadd64", _BYTE(left), _at(builder, at, 16 * _LINE * tile), _WORD(_LINE))
                for which, right in enumerate(_RIGHT):
                    _call(builder, "tdpbf16ps", _BYTE(_MIXED[2 * which + tile]), _BYTE(left), _BYTE(right))
        for register, place in places.items():
            _call(builder, "tilestored64", _BYTE(register), place, _WORD(_LINE))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit
