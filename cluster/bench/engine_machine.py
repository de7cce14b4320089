"""What the machine can do at most: read memory, and multiply matrices as large as a model's.

Both are the best of many short tries, because whatever comes between makes a try slower and never faster. They change with the
machine's speed from second to second, so they are measured again and again beside what is compared with them.

Memory is read as a large matrix that is multiplied by one vector: of torch's operations it reads fastest (half as fast again as a
sum, which follows one row at a time).

Limits: one process, torch's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
        """The best rate of reading all of it, in 1e9 bytes a second, over as many reads as fit into `seconds`; one at least."""
        return self._rows.numel() * 4 / 1e9 / best_s(lambda: torch.mv(self._rows, self._vector), seconds)


class Products:
    """Matrix products [rows, in] x [in, out] of linear layers `(out, in, how many)`, in bfloat16 or float32."""

    def __init__(self, linears: Sequence[Sequence[int]], dtype: torch.dtype, rows: int = GEMM_ROWS) -> None:
        generator = torch.Generator().manual_seed(1)
        self._pairs = [
            (
                torch.randn(rows, columns, generator=generator).to(dtype),
                torch.randn(out, columns, generator=generator).to(dtype),
                count,
            )
            for out, columns, count in linears
        ]

    @torch.inference_mode()
    def gflops(self, seconds: float) -> float:
        """The rate of one pass over all layers, each product at its best, over as many tries as fit into `seconds` in all."""
        share = seconds / len(self._pairs)
        flops = took_s = 0.0
        for x, weight, count in self._pairs:
            flops += 2.0 * x.shape[0] * weight.numel() * count
            took_s += count * best_s(lambda x=x, weight=weight: functional.linear(x, weight), share)  # type: ignore[misc]
        return flops / took_s / 1e9


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
