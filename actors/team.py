"""Compiled kernels on the threads that torch computes with.

torch on Linux computes with GNU OpenMP, whose threads wait for the next piece of work for some milliseconds before they sleep. A
second pool of threads beside them finds its processors busy with that waiting, and wakes late. So kernels are handed to torch's
own threads, by the call that compilers emit for a parallel region (`GOMP_parallel`, part of GNU OpenMP's stable interface), which
takes about two microseconds.

A kernel is a `thread_entry` (`kvpool/compiled.py`). All threads run it with the same record, 64-bit words of which the first,
0 to begin with, is theirs to share out the work: whoever adds to it (`fetch_add`) has taken what it stood at. So a thread
that the operating system holds up leaves its share to the others.

GNU OpenMP keeps threads for every thread that ever computed with some, as long as that one lives, and once it has more than there
are processors, all of them sleep after an instant and must be woken for each piece of work, a hundred times in a decode step. So
only one thread may have a team for good, the one that computes steps; whatever else computes does so `apart`.

Limits: where torch brings another OpenMP than GNU's, kernels run on the calling thread alone.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvpool.compiled import long_entry

_MAPS = Path("/proc/self/maps")
_TEAM_ROWS: Final = 32
_Result = TypeVar("_Result")


def _distance(path: str) -> tuple[int, str]:
    """Orders libraries: what came with torch, then the system's, then those that other packages bring."""
    own = Path(torch.__file__).parent
    if Path(path).is_relative_to(own) or Path(path).is_relative_to(own.with_name("torch.libs")):
        return 0, path
    return 2 if Path(path).is_relative_to(sys.prefix) else 1, path


@functools.cache
def _fork_address() -> int:
    """Of `GOMP_parallel` in the library that torch has loaded; 0 if it has none."""
    try:
        loaded = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "libgomp" in line}
    except OSError:
        return 0
    for path in sorted(loaded, key=_distance):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


@intrinsic
def _on_all(typing: Any, fork: Any, kernel: Any, record: Any, threads: Any) -> Any:
    """GOMP_parallel(kernel, record, threads, 0); without `fork`, kernel(record)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fork, kernel, record, threads = args
        word, half, nothing = ir.IntType(64), ir.IntType(32), ir.VoidType()
        alone = ir.FunctionType(nothing, [word]).as_pointer()
        shared = ir.FunctionType(nothing, [word, word, half, half]).as_pointer()
        with builder.if_else(builder.icmp_signed("==", fork, word(0))) as (then, other):
            with then:
                builder.call(builder.inttoptr(kernel, alone), [record])
            with other:
                how_many = builder.trunc(threads, half)
                builder.call(builder.inttoptr(fork, shared), [kernel, record, how_many, half(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@long_entry
def _run_kernel(fork: int, kernel: int, record: int, threads: int) -> int:
    _on_all(fork, kernel, record, threads)
    return 0


def threads_for(rows: int) -> int:
    """On how many threads a kernel runs whose rows take less than a microsecond each."""
    return torch.get_num_threads() if rows >= _TEAM_ROWS else 1


def run(kernel: int, threads: int, *words: int) -> None:
    """Run `kernel` on `threads` threads, the calling one among them, and wait. Its record is 0 and then `words`."""
    record = array("q", (0, *words))
    _run_kernel(_fork_address() if threads > 1 else 0, kernel, record.buffer_info()[0], threads)


def apart(work: Callable[[], _Result]) -> _Result:
    """Do `work` on a thread that ends with it, and whose team ends with that. Raises what it raises."""
    with ThreadPoolExecutor(1, "kvatlas-apart") as own:
        return own.submit(work).result()
