"""Linear layers with weights in the layout that oneDNN computes with, for bfloat16 on the CPU.

torch hands its weights to oneDNN row by row and pays for that in every call; for the few rows of a decode step it is most of
the step. Here each weight is laid out once, at load. The numbers are the same products, summed in another order.

It works on any model: every plain `nn.Linear` is replaced by a module that answers for it, after its own result has been
compared with the original's. `undo` puts the originals back, so a caller can make sure that the whole model still computes the
same. Where torch's operators are missing, the CPU has no bfloat16, or a layer fails its comparison, layers stay as they are.

oneDNN compiles code for every number of rows that it meets and keeps it, hundreds of kilobytes each. So rows are filled up to
one of a few numbers (`padded_rows`): memory stops growing after the first minutes, and few steps wait for a compiler.

Up to `panels.MOST_ROWS` rows, which oneDNN is slow at, are multiplied by kernels of our own, from the same weights
(`panels.py`).

What a row comes to depends on how many are computed with it: oneDNN chooses by that how it sums. Where it must not, every
product is of multiples of `SET_ROWS` rows, and ours on matrix tiles, which sum each row alike; without tiles it is oneDNN's,
as many products of `SET_ROWS` rows as it takes. Nothing else about a row's neighbours matters then.

Limits: the operators are torch's own but not public; `pyproject.toml` pins torch's minor version. A layer that is tied to an
embedding needs its weight twice. Code that computes with `module.weight` itself finds a tensor without memory there and fails.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from actors import panels

_log = logging.getLogger(__name__)
_LAYOUT_ROWS = 16
"""Rows for which oneDNN chooses the layout; it serves one row and hundreds as well."""
_PROBE_ROWS = (1, 5, 64)
SET_ROWS = 32
"""Rows of each product where results must not depend on their number. Two tiles of the matrix units that CPUs have."""
_WORST_RATIO = 2.0
"""A packed layer may be this much further from float32 than the plain one, in the mean."""


class PackedLinear(nn.Module):
    """Answers for `linear`, whose weight is [out, in]."""

    def __init__(self, linear: nn.Linear, fill: Fill) -> None:
        super().__init__()
        self._fill = fill
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)
        """Shape and type only, for code that asks for them."""
        self.bias = linear.bias
        self._product = PackedWeight.of(linear, set_rows=fill is set_rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        rows = x.numel() // self.in_features
        missing = self._fill(rows) - rows
        flat = x.reshape(rows, self.in_features)
        filled = nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat
        return self._product(filled)[:rows].view(*x.shape[:-1], self.out_features)


class PackedWeight:
    """One or more plain linear layers with the same input as one product. Rows are the caller's to fill up (`Fill`)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, set_rows: bool) -> None:
        """`weight` is [out, in]. With `set_rows` it takes only multiples of `SET_ROWS`, and their number does not matter."""
        self._outputs, self._inputs = weight.shape
        self._set_rows = set_rows
        self._bias = bias
        self._panel_rows = sys.maxsize
        if onednn_packs():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
            self._panels = panels.address_of(self._packed, weight)
            if not self._panels or (set_rows and not panels.sums_alike()):
                self._panel_rows = -1
            elif not set_rows:
                self._panel_rows = panels.MOST_ROWS
        else:
            self._packed = panels.laid_out(weight)
            self._panels = self._packed.data_ptr()
            self._bias = None if bias is None else _widened(bias, panels.PANEL)

    @classmethod
    def of(cls, *linears: nn.Linear, set_rows: bool) -> PackedWeight:
        """The outputs of `linears` side by side. Either all have a bias or none has."""
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        return cls(weight, torch.cat(biases) if biases else None, set_rows=set_rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        if x.shape[0] <= self._panel_rows:
            return self._by_panels(x, None)
        if self._set_rows and x.shape[0] > SET_ROWS:
            return torch.cat([self(part) for part in x.split(SET_ROWS)])
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    def added_to(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """`other` [rows, out] plus the product, rounded once."""
        if x.shape[0] <= self._panel_rows:
            return self._by_panels(x, other)
        if self._set_rows and x.shape[0] > SET_ROWS:
            parts = zip(x.split(SET_ROWS), other.split(SET_ROWS), strict=True)
            return torch.cat([self.added_to(part, beside) for part, beside in parts])
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self._bias, "add")
        return out

    def _by_panels(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        outputs = -(-self._outputs // panels.PANEL) * panels.PANEL
        if self._inputs % panels.PANEL:
            x = _widened(x, panels.PANEL)
        if other is not None and outputs != self._outputs:
            other = _widened(other, panels.PANEL)
        found = panels.multiply(x, self._panels, self._bias, other, outputs, alike=self._set_rows)
        return found if outputs == self._outputs else found[:, : self._outputs].contiguous()


def _widened(x: torch.Tensor, unit: int) -> torch.Tensor:
    """[..., n] with zeros up to a multiple of `unit`."""
    return nn.functional.pad(x, (0, -x.shape[-1] % unit))


Fill = Callable[[int], int]
"""How many rows are computed for so many."""


def padded_rows(rows: int) -> int:
    """A `Fill`: all numbers up to 8, then four for each doubling."""
    unit = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // unit) * unit


def set_rows(rows: int) -> int:
    """A `Fill`: multiples of `SET_ROWS`."""
    return -(-rows // SET_ROWS) * SET_ROWS


@dataclass(frozen=True, slots=True)
class Packing:
    """What was replaced. `undo` puts the originals back."""

    layers: int
    undo: Callable[[], None]


@torch.inference_mode()
def pack(model: nn.Module, fill: Fill = padded_rows) -> Packing:
    """Replace what can be replaced in `model`, which it mutates. Raises nothing. `fill` is `padded_rows` or `set_rows`."""
    replaced: list[tuple[nn.Module, str, nn.Linear]] = []

    def undo() -> None:
        for parent, name, original in replaced:
            setattr(parent, name, original)

    if supported():
        try:
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if is_plain(child):
                        packed = PackedLinear(child, fill)
                        if _agree(child, packed):
                            setattr(parent, name, packed)
                            replaced.append((parent, name, child))
        except RuntimeError:
            _log.warning("linear layers stay as they are: packing them failed", exc_info=True)
            undo()
            replaced.clear()
    return Packing(len(replaced), undo)


def supported() -> bool:
    """Whether weights in bfloat16 can be packed here, by oneDNN or by ourselves."""
    return onednn_packs() or panels.usable()


@functools.cache
def onednn_packs() -> bool:
    """Whether this torch has the operators, and this CPU instructions for bfloat16."""
    operators: Any = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):
        return False
    return bool(operators._is_mkldnn_bf16_supported())


def is_plain(linear: object) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer in bfloat16 on the CPU, without hooks or parametrisations that a replacement would lose."""
    if type(linear) is not nn.Linear:
        return False
    hooked = linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "parametrizations")
    return linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu" and not hooked


def _agree(plain: nn.Linear, packed: PackedLinear) -> bool:
    """Whether the two are about equally far from the product in float32, on random rows."""
    generator = torch.Generator().manual_seed(1)
    weight = plain.weight.float()
    bias = None if plain.bias is None else plain.bias.float()
    for rows in _PROBE_ROWS:
        x = torch.randn(rows, plain.in_features, generator=generator).to(torch.bfloat16)
        exact = nn.functional.linear(x.float(), weight, bias)
        allowed = _WORST_RATIO * float((plain(x).float() - exact).abs().mean()) + 1e-6
        if not float((packed(x).float() - exact).abs().mean()) <= allowed:
            _log.warning("a linear layer of %d x %d stays as it is: packed it differs", *plain.weight.shape)
            return False
    return True
