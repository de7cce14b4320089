"""The product of any number of rows with a weight in bfloat16, on vectors: for CPUs without instructions for bfloat16.

There torch and oneDNN compute bfloat16 by emulation, at a tenth of the speed of float32. Here a weight stays in bfloat16, which
halves what is read, and is widened in registers.

The layout: panels of 16 outputs behind each other; in each, for every pair of inputs, the pair of each of the 16, as
`pair_sums.py` takes them. So a panel is read from its beginning to its end, which memory likes best. Rows are float32. Sums are
float32, and rounded once.

Limits: x86 with vectors of 8 float32 (AVX2, FMA). One or two rows' sums differ in their last bit from what the same rows come to
among more, unless they are asked to be `alike`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from llvmlite import binding
from numba import carray

from actors.lanes import float_at, load_narrow, narrow, store
from actors.pair_sums import ROWS, pair_sums
from actors.panels import AHEAD, finish
from actors.team import run, threads_for
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get

PANEL: Final = 16
_FEW: Final = 2
_PANELS: Final = 3
"""That a thread takes at a time: one after the other in memory."""
_INPUTS: Final = 512
"""Summed at a time, of many rows: a panel's pairs of so many, and those rows, fit into the first-level cache."""
_BLOCK_ROWS: Final = 128
"""Whose sums fit into the second-level cache beside a panel."""
_PAIRS: Final = 4 * PANEL
"""Bytes of a pair of inputs in a panel, and of a row of its sums."""
_SPARE: Final = 16
"""Floats to begin at a cache line."""
_WIDENED: Final = 4096
"""Elements that a thread takes at a time."""

_one_row, _two_rows = pair_sums(1, chains=2, ahead=AHEAD), pair_sums(2, chains=2, ahead=AHEAD)
_first_rows, _more_rows = pair_sums(ROWS, ahead=AHEAD), pair_sums(ROWS)


@inner
def _multiply_panel(record: int, few: bool, panel: int, space: Any, sums: int, sums_at: int) -> None:
    x, weight = get(record + 8), get(record + 16)
    rows, inputs = get(record + 48), get(record + 56)
    panel_at = weight + panel * inputs // 2 * _PAIRS
    if few:
        if rows == 1:
            _one_row(x, 4 * inputs, 4, panel_at, _PAIRS, inputs // 2, sums_at, _PAIRS, 0)
        else:
            _two_rows(x, 4 * inputs, 4, panel_at, _PAIRS, inputs // 2, sums_at, _PAIRS, 0)
        finish(record, space, sums, PANEL, panel, 0, rows)
        return
    for first in range(0, rows, _BLOCK_ROWS):
        end = min(rows, first + _BLOCK_ROWS)
        for done in range(0, inputs, _INPUTS):
            pairs, pairs_at = min(_INPUTS, inputs - done) // 2, panel_at + done // 2 * _PAIRS
            at, to = x + 4 * (first * inputs + done), sums_at
            _first_rows(at, 4 * inputs, 4, pairs_at, _PAIRS, pairs, to, _PAIRS, done)
            for _ in range(first + ROWS, end, ROWS):
                at, to = at + 4 * ROWS * inputs, to + ROWS * _PAIRS
                _more_rows(at, 4 * inputs, 4, pairs_at, _PAIRS, pairs, to, _PAIRS, done)
        finish(record, space, sums, PANEL, panel, first, end)


@inner
def _multiply(record: int, few: bool) -> None:
    outputs = get(record + 64)
    space = np.zeros(_BLOCK_ROWS * PANEL + _SPARE, np.float32)
    sums = -(space.ctypes.data // 4) % 16  # a cache line's start
    sums_at = space.ctypes.data + 4 * sums
    count = outputs // PANEL
    while True:
        begin = fetch_add(record, _PANELS)
        if begin >= count:
            break
        for panel in range(begin, min(count, begin + _PANELS)):
            _multiply_panel(record, few, panel, space, sums, sums_at)
    space[0] = 0.0  # an array is freed after its last use, and its address is none


@thread_entry
def _multiply_few(record: int) -> None:
    """out := x times the weight, plus bias, plus other, of one row or two.

    Words: addresses of x, float32 [rows, inputs], of the weight, of bias [outputs] or 0, of other [rows, outputs] or 0, and of
    out, bfloat16 [rows, outputs]; rows; inputs; outputs.
    """
    _multiply(record, True)


@thread_entry
def _multiply_many(record: int) -> None:
    """The same for any number of rows; x has whole groups of `ROWS`, whatever is in those that are no one's."""
    _multiply(record, False)


@thread_entry
def _widen(record: int) -> None:
    """Words: addresses of bfloat16 and of float32; how many, a multiple of 16."""
    count = get(record + 24)
    source, target = narrow(get(record + 8)), carray(float_at(get(record + 16)), (count,))
    while True:
        first = fetch_add(record, _WIDENED)
        if first >= count:
            break
        for d in range(first, min(count, first + _WIDENED), 16):
            store(target, d, load_narrow(source, d))


def usable() -> bool:
    """Whether this CPU has such vectors."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx2") and features.get("fma"))


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Returns the panels of a bfloat16 `weight` [outputs, inputs]: [panels, inputs / 2, 16, 2].

    Outputs are filled up with zeros to multiples of `PANEL`, and so are inputs.
    """
    weight = torch.nn.functional.pad(weight, (0, -weight.shape[1] % PANEL, 0, -weight.shape[0] % PANEL))
    return weight.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def multiply(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None, *, alike: bool
) -> torch.Tensor:
    """Returns bfloat16 [rows, outputs] from bfloat16 `x` [rows, inputs] and what `laid_out` returned.

    `bias` [outputs], contiguous, and `other` [rows, outputs], both bfloat16, are added. `alike`: what a row comes to is the same
    with any number of others.
    """
    rows, inputs = x.shape
    outputs = panels.shape[0] * PANEL
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    few = rows <= _FEW and not alike
    wide = torch.empty(rows if few else -(-rows // ROWS) * ROWS, inputs)
    if len(wide) > rows:
        wide[rows:].zero_()  # what lies there may be denormal, and slow
    x, other = x.contiguous(), None if other is None else other.contiguous()
    threads = torch.get_num_threads()
    run(_widen, threads_for(rows), x.data_ptr(), wide.data_ptr(), rows * inputs)
    added = (0 if bias is None else bias.data_ptr(), 0 if other is None else other.data_ptr())
    places = (wide.data_ptr(), panels.data_ptr(), *added, out.data_ptr())
    run(_multiply_few if few else _multiply_many, threads, *places, rows, inputs, outputs)
    return out
