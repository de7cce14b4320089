"""What the machine can do at most: read memory, and multiply matrices as large as a model's.

Both are the best of many short tries, because whatever comes between makes a try slower and never faster. They change with the
machine's speed from second to second, so they are measured again and again beside what is compared with them.

Memory is read as a large matrix that is multiplied by one vector, and as one that is summed: which of torch's operations reads
faster depends on the CPU, by half as much again.

Limits: one process, torch's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch.nn import functional

GEMM_ROWS: Final = 512
_COLUMNS: Final = 4096


class Memory:
    """A buffer of `size_bytes` to read, at least 16 KiB. Making it touches every page."""

    def __init__(self, size_bytes: int) -> None:
        self._rows = torch.ones(size_bytes // 4 // _COLUMNS, _COLUMNS)
        self._vector = torch.ones(_COLUMNS)

    @torch.inference_mode()
    def read_gb_s(self, seconds: float) -> float:
        """The best rate of reading all of it, in 1e9 bytes a second, over as many reads as fit into `seconds`; two at least."""
        reads = (partial(torch.mv, self._rows, self._vector), self._rows.sum)
        return self._rows.numel() * 4 / 1e9 / min(best_s(read, seconds / len(reads)) for read in reads)


class Products:
    """Matrix products [rows, in] x [in, out] of linear layers `(out, in, how many)`, in the fastest of `dtypes`.

    In bfloat16 that may be float32: a CPU without instructions for bfloat16 computes with it by emulation.
    """

    def __init__(self, linears: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], rows: int = GEMM_ROWS) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = rows
        self._linears = [
            (out * columns, count, [_pair(generator, rows, out, columns, dtype) for dtype in dtypes])
            for out, columns, count in linears
        ]

    @torch.inference_mode()
    def gflops(self, seconds: float) -> float:
        """The rate of one pass over all layers, each product at its best, over as many tries as fit into `seconds` in all."""
        share = seconds / sum(len(pairs) for _, _, pairs in self._linears)
        flops = took_s = 0.0
        for size, count, pairs in self._linears:
            flops += 2.0 * self._rows * size * count
            took_s += count * min(best_s(partial(functional.linear, *pair), share) for pair in pairs)
        return flops / took_s / 1e9


def _pair(
    generator: torch.Generator, rows: int, out: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(rows, columns, generator=generator), torch.randn(out, columns, generator=generator)
    return x.to(dtype), weight.to(dtype)


def best_s(work: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest time of `work`, over as many calls as fit into `seconds`; one at least."""
    begun = clock()
    best = float("inf")
    while True:
        before = clock()
        work()
        after = clock()
        best = min(best, after - before)
        if after - begun >= seconds:
            return best
