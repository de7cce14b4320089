"""Weights in bfloat16, laid out once for products on the CPU.

torch hands its weights to oneDNN row by row and pays for that in every call; for the few rows of a decode step it is most of
the step. So they are packed as oneDNN wants them (`PackedWeight`), or, where the CPU has no instructions for bfloat16, as our own
kernels do (`VectorWeight`). The numbers are the same products, summed in another order.

oneDNN compiles code for every number of rows that it meets and keeps it, hundreds of kilobytes each. So rows are filled up to
one of a few numbers (`padded_rows`): memory stops growing after the first minutes, and few steps wait for a compiler. Up to
`panels.MOST_ROWS` rows, which oneDNN is slow at, are multiplied by kernels of our own, from the same weights (`panels.py`).

What a row comes to depends on how many are computed with it: oneDNN chooses by that how it sums. Where it must not, every
product is of multiples of `SET_ROWS` rows, and ours on matrix tiles, which sum each row alike; without tiles it is oneDNN's,
as many products of `SET_ROWS` rows as it takes. Nothing else about a row's neighbours matters then. Our own kernels for vectors
sum every row alike whatever its company, and need no rows to be filled up.

Limits: the operators are torch's own but not public; `pyproject.toml` pins torch's minor version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from actors import panels, vector_panels

_LAYOUT_ROWS = 16
"""Rows for which oneDNN chooses the layout; it serves one row and hundreds as well."""
SET_ROWS = 32
"""Rows of each product where results must not depend on their number. Two tiles of the matrix units that CPUs have."""


class PackedWeight:
    """A weight that oneDNN packs. Rows are the caller's to fill up (`Fill`)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, alike: bool) -> None:
        """`weight` is [out, in]. If `alike` it takes only multiples of `SET_ROWS`, and their number does not matter."""
        self._outputs = int(weight.shape[0])
        self._bias = bias
        self._alike = alike
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        self._panels = 0 if alike and not panels.sums_alike() else panels.address_of(self._packed, weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        if self._panels and (self._alike or x.shape[0] <= panels.MOST_ROWS):
            return panels.multiply(x, self._panels, self._bias, None, self._outputs)
        if self._alike and x.shape[0] > SET_ROWS:
            return torch.cat([self(part) for part in x.split(SET_ROWS)])
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    def added_to(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """`other` [rows, out] plus the product, rounded once."""
        if self._panels and (self._alike or x.shape[0] <= panels.MOST_ROWS):
            return panels.multiply(x, self._panels, self._bias, other, self._outputs)
        if self._alike and x.shape[0] > SET_ROWS:
            parts = zip(x.split(SET_ROWS), other.split(SET_ROWS), strict=True)
            return torch.cat([self.added_to(part, beside) for part, beside in parts])
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self._bias, "add")
        return out


class VectorWeight:
    """The same where oneDNN packs no bfloat16. Any number of rows is right."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, alike: bool) -> None:
        self._outputs, self._inputs = weight.shape
        self._panels = vector_panels.laid_out(weight)
        self._bias = None if bias is None else _widened(bias)
        self._alike = alike

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        return self._multiplied(x, None)

    def added_to(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """`other` [rows, out] plus the product, rounded once."""
        return self._multiplied(x, _widened(other))

    def _multiplied(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        found = vector_panels.multiply(_widened(x), self._panels, self._bias, other, alike=self._alike)
        return found if found.shape[1] == self._outputs else found[:, : self._outputs].contiguous()


def _widened(x: torch.Tensor) -> torch.Tensor:
    """[..., n] with zeros up to a multiple of a panel's outputs."""
    missing = -x.shape[-1] % vector_panels.PANEL
    return nn.functional.pad(x, (0, missing)) if missing else x


def packed_weight(*linears: nn.Linear, alike: bool) -> PackedWeight | VectorWeight:
    """The outputs of `linears`, which have the same input, side by side. Either all have a bias or none has."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    kind = PackedWeight if onednn_packs() else VectorWeight
    return kind(weight, torch.cat(biases) if biases else None, alike=alike)


Fill = Callable[[int], int]
"""How many rows are computed for so many."""


def fill_for(*, alike: bool) -> Fill:
    """How the rows of products are filled up on this CPU; `alike` where a row must not depend on their number."""
    if not onednn_packs():
        return int
    return set_rows if alike else padded_rows


def padded_rows(rows: int) -> int:
    """All numbers up to 8, then four for each doubling."""
    unit = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // unit) * unit


def set_rows(rows: int) -> int:
    """Multiples of `SET_ROWS`."""
    return -(-rows // SET_ROWS) * SET_ROWS


def supported() -> bool:
    """Whether weights in bfloat16 can be packed here, by oneDNN or by ourselves."""
    return onednn_packs() or vector_panels.usable()


@functools.cache
def onednn_packs() -> bool:
    """Whether this torch has the operators, and this CPU instructions for bfloat16."""
    operators: Any = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):
        return False
    return bool(operators._is_mkldnn_bf16_supported())
