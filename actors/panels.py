"""The product of rows with a packed weight, for bfloat16: what a decode step is made of.

A product of a few rows reads the whole weight for little arithmetic; it is as fast as memory is. oneDNN reads at half of that for
the sizes of small models, and is slow for some tens of rows too, so up to `MOST_ROWS` rows are multiplied here, from the very
bytes that oneDNN has packed: nothing is held twice. Where oneDNN packs no bfloat16, because the CPU has no instructions for it,
`laid_out` makes the same layout, and any number of rows is multiplied here.

The layout, where it is this one (`address_of` compares): panels of 32 outputs behind each other; in each, for every pair of
inputs, the pair of each of the 32: one word of 32 bits, as `pair_sums.py` takes them. Matrix tiles (`tiles.py`), where the CPU
has them, are fast for one row as well as for `MOST_ROWS`, of which oneDNN's own is faster only for more. On vectors there are two
kernels: for very few rows, and for any number of them. Sums are float32, and rounded once. Memory is asked for `_AHEAD` bytes
before it is needed, because the arithmetic waits for it otherwise.

Limits: inputs and outputs are multiples of 32. A row's sums depend, in their last bit, on how many rows there are, unless they
are asked to be `alike`.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import torch
from llvmlite import binding

from actors import tiles
from actors.lanes import fill, fma, load, load_narrow, narrow, store, store_narrow
from actors.pair_sums import ROWS, WIDE, pair_sums
from actors.team import run
from kvpool.compiled import inner, thread_entry
from kvpool.kernels.atomics import fetch_add, get

_FEW: Final = 4 if WIDE else 2
MOST_ROWS: Final = 96 if tiles.supported() else _FEW
PANEL: Final = 32
_AHEAD: Final = 4096
_INPUTS: Final = 512
"""Summed at a time, of many rows: half a panel's pairs of so many, and those rows, fit into the first-level cache."""
_BLOCK_ROWS: Final = 128
"""Whose sums fit into the second-level cache beside a panel."""
_PAIR_BYTES: Final = 4 * PANEL

_one_group, _two_groups = tiles.tile_sums(1), tiles.tile_sums(2)
_one_row = pair_sums(1, 2, chains=2, ahead=_AHEAD)
_two_rows = pair_sums(2, 2, chains=2 if WIDE else 1, ahead=_AHEAD)
_four_rows = pair_sums(4, 2, ahead=_AHEAD)
_first_rows, _more_rows = pair_sums(ROWS, ahead=_AHEAD), pair_sums(ROWS)
_ONE = np.float32(1.0)


@inner
def _finish(record: int, space: Any, sums: int, panel: int, first: int, end: int) -> None:
    """One panel's outputs of rows [first, end), from their sums in `space`."""
    bias, other, target = get(record + 24), get(record + 32), narrow(get(record + 40))
    outputs = get(record + 64)
    one = fill(_ONE)
    for row in range(first, end):
        for d in range(0, PANEL, 16):
            value = load(space, sums + (row - first) * PANEL + d)
            at = panel * PANEL + d
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
            _one_row(x_at, 4 * inputs, 4, panel_at, _PAIR_BYTES, inputs // 2, sums_at, _PAIR_BYTES, 0)
        elif rows == 2:
            _two_rows(x_at, 4 * inputs, 4, panel_at, _PAIR_BYTES, inputs // 2, sums_at, _PAIR_BYTES, 0)
        elif WIDE:
            _four_rows(x_at, 4 * inputs, 4, panel_at, _PAIR_BYTES, inputs // 2, sums_at, _PAIR_BYTES, 0)
        _finish(record, space, sums, panel, 0, rows)


@thread_entry
def _multiply_many(record: int) -> None:
    """The same for any number of rows; x is float32, and has whole groups of `ROWS`, whatever is in those that are no one's."""
    x, weight = get(record + 8), get(record + 16)
    rows, inputs, outputs = get(record + 48), get(record + 56), get(record + 64)
    space = np.zeros(_BLOCK_ROWS * PANEL + 16, np.float32)
    sums = -(space.ctypes.data // 4) % 16
    sums_at = space.ctypes.data + 4 * sums
    while True:
        panel = fetch_add(record, 1)
        if panel >= outputs // PANEL:
            break
        panel_at = weight + panel * inputs * PANEL * 2
        for first in range(0, rows, _BLOCK_ROWS):
            end = min(rows, first + _BLOCK_ROWS)
            for done in range(0, inputs, _INPUTS):
                pairs, pairs_at = min(_INPUTS, inputs - done) // 2, panel_at + done // 2 * _PAIR_BYTES
                for half in range(0, 64 * 2, 64):
                    at, to = x + 4 * (first * inputs + done), sums_at + half
                    _first_rows(at, 4 * inputs, 4, pairs_at + half, _PAIR_BYTES, pairs, to, _PAIR_BYTES, done)
                    for _ in range(first + ROWS, end, ROWS):
                        at, to = at + 4 * ROWS * inputs, to + ROWS * _PAIR_BYTES
                        _more_rows(at, 4 * inputs, 4, pairs_at + half, _PAIR_BYTES, pairs, to, _PAIR_BYTES, done)
            _finish(record, space, sums, panel, first, end)
    space[0] = 0.0  # an array is freed after its last use, and its address is none


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
                    _two_groups(x_at, 2 * inputs, panel_at, inputs // 2, sums_at, _AHEAD)
                else:
                    _one_group(x_at, 2 * inputs, panel_at, inputs // 2, sums_at, _AHEAD)
                _finish(record, space, sums, panel, first, end)
        tiles.end_tiles(setting_at)
        space[0] = 0.0  # an array is freed after its last use, and its address is none

    return multiply_tiles


_multiply_tiles: Final = _multiply_with_tiles()


def usable() -> bool:
    """Whether all products can be computed here without oneDNN, and fast: on x86, with vectors of 8 float32 or 16."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx2") and features.get("fma"))


def sums_alike() -> bool:
    """Whether `multiply` of a multiple of two tiles' rows is better than oneDNN where rows must be summed `alike`."""
    return bool(_multiply_tiles)


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Returns the panels of a bfloat16 `weight` [outputs, inputs]: [panels, inputs / 2, 32, 2].

    Both are filled up to multiples of 32, with zeros.
    """
    outputs, inputs = weight.shape
    weight = torch.nn.functional.pad(weight, (0, -inputs % PANEL, 0, -outputs % PANEL))
    return weight.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


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
        wanted = laid_out(rows).view(torch.uint8).flatten()
        if ctypes.string_at(address + panel * panel_bytes, panel_bytes) != wanted.numpy().tobytes():
            return 0
    return address


def multiply(
    x: torch.Tensor,
    weight_at: int,
    bias: torch.Tensor | None,
    other: torch.Tensor | None,
    outputs: int,
    *,
    alike: bool = False,
) -> torch.Tensor:
    """Returns bfloat16 [rows, outputs] from bfloat16 `x` [rows, inputs].

    `weight_at` is the address of panels; `bias` [outputs], contiguous, and `other` [rows, outputs], both bfloat16, are added.
    `alike`: what a row comes to is the same with any number of others; on tiles, with multiples of two tiles' rows.
    """
    rows, inputs = x.shape
    other = None if other is None else other.contiguous()
    out = x.new_empty(rows, outputs)
    if not rows:  # of which a step has none that wants logits; tiles of no rows are a fault
        return out
    if _multiply_tiles:
        kernel, x = _multiply_tiles, _whole(x, tiles.ROWS) if rows > tiles.ROWS else x.contiguous()
    elif rows <= _FEW and not alike:
        kernel, x = _multiply_few, x.contiguous()
    else:
        kernel, x = _multiply_many, _whole(x.float(), ROWS)
    added = (0 if bias is None else bias.data_ptr(), 0 if other is None else other.data_ptr())
    places = (x.data_ptr(), weight_at, *added, out.data_ptr())
    run(kernel, torch.get_num_threads(), *places, rows, inputs, outputs)
    return out


def _whole(x: torch.Tensor, unit: int) -> torch.Tensor:
    """Contiguous, with rows of zeros up to a multiple of `unit`."""
    missing = -x.shape[0] % unit
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
