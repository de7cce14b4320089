"""The product of a few rows with a packed weight, for bfloat16: what a decode step is made of.

Such a product reads the whole weight for little arithmetic; it is as fast as memory is. oneDNN reads at half of that for the
sizes of small models, and is slow for some tens of rows too, so up to `MOST_ROWS` rows are multiplied here, from the very bytes
that oneDNN has packed: nothing is held twice. (Where it packs none: `vector_panels.py`.)

The layout, where it is this one (`address_of` compares): panels of 32 outputs behind each other; in each, for every pair of
inputs, the pair of each of the 32, as `pair_sums.py` takes them. Vectors are fast enough for up to four rows; matrix tiles,
where the CPU has them (`tiles.py`), for one row as well as for `MOST_ROWS`, of which oneDNN's own is faster only for more. Sums
are float32, and rounded once. Memory is asked for `AHEAD` bytes before it is needed, because the arithmetic waits for it
otherwise.

Limits: inputs and outputs are multiples of 32. A row's sums depend, in their last bit, on how many rows there are.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import torch

from actors import tiles
from actors.lanes import fill, fma, load, load_narrow, narrow, store, store_narrow
from actors.pair_sums import pair_sums
from actors.team import run
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get

_FEW: Final = 4
MOST_ROWS: Final = 96 if tiles.supported() else _FEW
PANEL: Final = 32
AHEAD: Final = 4096
_PAIRS: Final = 4 * PANEL
"""Bytes of a pair of inputs in a panel, and of a row of its sums."""

_one_group, _two_groups = tiles.tile_sums(1), tiles.tile_sums(2)
_one_row, _two_rows, _four_rows = (pair_sums(rows, 2, chains=1 if rows == 4 else 2, ahead=AHEAD) for rows in (1, 2, 4))
_ONE = np.float32(1.0)


@inner
def finish(record: int, space: Any, sums: int, width: int, panel: int, first: int, end: int) -> None:
    """The `width` outputs of one panel, of rows [first, end), from their sums in `space`. The record is `_multiply_few`'s."""
    bias, other, target = get(record + 24), get(record + 32), narrow(get(record + 40))
    outputs = get(record + 64)
    one = fill(_ONE)
    for row in range(first, end):
        for d in range(0, width, 16):
            value = load(space, sums + (row - first) * width + d)
            at = panel * width + d
            if bias != 0:
                value = fma(load_narrow(narrow(bias), at), one, value)
            if other != 0:
                value = fma(load_narrow(narrow(other), row * outputs + at), one, value)
            store_narrow(target, row * outputs + at, value)


@thread_entry
def _multiply_few(record: int) -> None:
    """out := x times the weight, plus bias, plus other.

    Words: addresses of x, bfloat16 [rows, inputs], of the weight, of bias [outputs] or 0, of other [rows, outputs] or 0, and of
    out, bfloat16 [rows, outputs]; rows, 1 to 4; inputs; outputs.
    """
    source, weight = narrow(get(record + 8)), get(record + 16)
    rows, inputs, outputs = get(record + 48), get(record + 56), get(record + 64)
    space = np.zeros(_FEW * (inputs + PANEL) + 16, np.float32)  # a row that is missing is zeros
    wide = -(space.ctypes.data // 4) % 16  # a cache line's start
    sums = wide + _FEW * inputs
    for d in range(0, rows * inputs, 16):
        store(space, wide + d, load_narrow(source, d))
    x_at, sums_at = space.ctypes.data + 4 * wide, space.ctypes.data + 4 * sums
    while True:
        panel = fetch_add(record, 1)
        if panel >= outputs // PANEL:
            break
        panel_at = weight + panel * inputs * PANEL * 2
        if rows == 1:
            _one_row(x_at, 4 * inputs, 4, panel_at, _PAIRS, inputs // 2, sums_at, _PAIRS, 0)
        elif rows == 2:
            _two_rows(x_at, 4 * inputs, 4, panel_at, _PAIRS, inputs // 2, sums_at, _PAIRS, 0)
        else:
            _four_rows(x_at, 4 * inputs, 4, panel_at, _PAIRS, inputs // 2, sums_at, _PAIRS, 0)
        finish(record, space, sums, PANEL, panel, 0, rows)


def _multiply_with_tiles() -> int:
    """The same kernel for any number of rows, which compiles only where there are tiles; else 0.

    Of more than 16 rows x has whole groups of 16, whatever is in the rows that are no one's.
    """
    if not tiles.supported():
        return 0

    @thread_entry
    def multiply_tiles(record: int) -> None:
        x, weight = get(record + 8), get(record + 16)
        rows, inputs, outputs = get(record + 48), get(record + 56), get(record + 64)
        space = np.zeros(2 * tiles.ROWS * PANEL + 16 + 32, np.float32)
        sums = -(space.ctypes.data // 4) % 16
        sums_at = space.ctypes.data + 4 * sums
        setting_at = sums_at + 4 * 2 * tiles.ROWS * PANEL
        tiles.begin_tiles(min(rows, tiles.ROWS), setting_at)
        while True:
            panel = fetch_add(record, 1)
            if panel >= outputs // PANEL:
                break
            panel_at = weight + panel * inputs * PANEL * 2
            for first in range(0, rows, 2 * tiles.ROWS):
                x_at, end = x + 2 * inputs * first, min(rows, first + 2 * tiles.ROWS)
                if end - first > tiles.ROWS:
                    _two_groups(x_at, 2 * inputs, panel_at, inputs // 2, sums_at, AHEAD)
                else:
                    _one_group(x_at, 2 * inputs, panel_at, inputs // 2, sums_at, AHEAD)
                finish(record, space, sums, PANEL, panel, first, end)
        tiles.end_tiles(setting_at)
        space[0] = 0.0  # an array is freed after its last use, and its address is none

    return multiply_tiles


_multiply_tiles: Final = _multiply_with_tiles()


def sums_alike() -> bool:
    """Whether what a row comes to is the same with any number of others, where that is a multiple of two tiles' rows."""
    return bool(_multiply_tiles)


def address_of(packed: torch.Tensor, weight: torch.Tensor) -> int:
    """Returns where the panels of `packed` are, which oneDNN made of `weight` [outputs, inputs]; 0 if it has another layout.

    The address is valid as long as `packed`. Compares the first panel, the last and one between.
    """
    outputs, inputs = weight.shape
    operators: Any = torch.ops.mkldnn
    if outputs % PANEL or inputs % PANEL or not hasattr(operators, "data_ptr") or not hasattr(operators, "_nbytes"):
        return 0
    panel_bytes = inputs * PANEL * 2
    if operators._nbytes(packed) != outputs // PANEL * panel_bytes:
        return 0
    address = int(operators.data_ptr(packed))
    last = outputs // PANEL - 1
    for panel in {0, last // 2, last}:
        rows = weight[panel * PANEL : (panel + 1) * PANEL].contiguous()
        wanted = rows.view(PANEL, inputs // 2, 2).transpose(0, 1).contiguous().view(torch.uint8).flatten()
        if ctypes.string_at(address + panel * panel_bytes, panel_bytes) != wanted.numpy().tobytes():
            return 0
    return address


def multiply(
    x: torch.Tensor, weight_at: int, bias: torch.Tensor | None, other: torch.Tensor | None, outputs: int
) -> torch.Tensor:
    """Returns bfloat16 [rows, outputs] from bfloat16 `x` [rows, inputs], at most `MOST_ROWS` rows, without limit on tiles.

    `weight_at` from `address_of`; `bias` [outputs], contiguous, and `other` [rows, outputs], both bfloat16, are added.
    """
    rows, inputs = x.shape
    x = x.contiguous()
    other = None if other is None else other.contiguous()
    out = x.new_empty(rows, outputs)
    if not rows:  # of which a step has none that wants logits; tiles of no rows are a fault
        return out
    if rows > tiles.ROWS and rows % tiles.ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % tiles.ROWS))
    added = (0 if bias is None else bias.data_ptr(), 0 if other is None else other.data_ptr())
    run(
        _multiply_tiles or _multiply_few,
        torch.get_num_threads(),
        x.data_ptr(),
        weight_at,
        *added,
        out.data_ptr(),
        rows,
        inputs,
        outputs,
    )
    return out
