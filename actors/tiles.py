"""Matrix tiles of Intel CPUs (AMX) for numba kernels: up to 16 rows times a panel of packed weights in bfloat16.

The tile registers are eight of 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 inputs with 16 outputs of such 32
inputs, so up to 16 rows cost what one does: reading the weights. Their shape is set for each thread; whatever another library had
set is put back afterwards.

Linux gives tiles to a process that asks for them. Where there are none `supported` says so, and `tile_sums` must not be called:
it does not even compile.

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

MOST_ROWS: Final = 16
_ARCH_PRCTL: Final = 158
_ARCH_GET_XCOMP_PERM: Final = 0x1022
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_TILE_DATA: Final = 18

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_PLACE = _BYTE.as_pointer()
_SUMS, _INPUTS, _WEIGHTS = (0, 1), 2, (3, 4)
"""Which register holds what; two for two halves of a panel."""
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
    """Set this thread's tiles for `rows` rows. `space` is the address of 128 bytes, kept for `end_tiles`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, space = args
        _call(builder, "sttilecfg", _at(builder, space, _LINE))
        for place in range(0, _LINE, 8):
            builder.store(_WORD(0), builder.bitcast(_at(builder, space, place), _WORD.as_pointer()))
        builder.store(_BYTE(1), _at(builder, space))  # the palette
        for register in (*_SUMS, _INPUTS, *_WEIGHTS):
            builder.store(_BYTE(_LINE), _at(builder, space, 16 + 2 * register))
            count = _BYTE(16) if register in _WEIGHTS else builder.trunc(rows, _BYTE)
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


@intrinsic
def tile_sums(typing: Any, x: Any, stride: Any, panel: Any, pairs: Any, out: Any, ahead: Any) -> Any:
    """out := x times a panel of 32 outputs, between `begin_tiles` and `end_tiles`.

    Addresses of the rows, bfloat16, `stride` bytes apart; of the panel, as for `lanes.panel_sums`; and of float32 [rows, 32].
    `pairs` of inputs is a multiple of 16. The panel is asked for `ahead` bytes before it is needed.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, stride, panel, pairs, out, ahead = args
        for register in _SUMS:
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
            _call(
                builder,
                "tileloadd64",
                _BYTE(_INPUTS),
                _at(builder, builder.add(x, builder.mul(pair, _WORD(4)))),
                stride,
            )
            for half in range(2):
                _call(builder, "tileloadd64", _BYTE(_WEIGHTS[half]), _at(builder, at, half * _LINE), _WORD(2 * _LINE))
                _call(builder, "tdpbf16ps", _BYTE(_SUMS[half]), _BYTE(_INPUTS), _BYTE(_WEIGHTS[half]))
        for half in range(2):
            _call(builder, "tilestored64", _BYTE(_SUMS[half]), _at(builder, out, half * _LINE), _WORD(2 * _LINE))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit
