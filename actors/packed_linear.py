"""Plain linear layers with packed weights (`packed_weight.py`), for bfloat16 on the CPU.

It works on any model: every plain `nn.Linear` is replaced by a module that answers for it, after its own result has been
compared with the original's. `undo` puts the originals back, so a caller can make sure that the whole model still computes the
same. Where weights cannot be packed, or a layer fails its comparison, layers stay as they are.

Limits: a layer that is tied to an embedding needs its weight twice. Code that computes with `module.weight` itself finds a tensor
without memory there and fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import nn

from actors.packed_weight import fill_for, packed_weight, supported

_log = logging.getLogger(__name__)
_PROBE_ROWS = (1, 5, 64)
_WORST_RATIO = 2.0
"""A packed layer may be this much further from float32 than the plain one, in the mean."""


class PackedLinear(nn.Module):
    """Answers for `linear`, whose weight is [out, in]."""

    def __init__(self, linear: nn.Linear, *, alike: bool) -> None:
        super().__init__()
        self._fill = fill_for(alike=alike)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)
        """Shape and type only, for code that asks for them."""
        self.bias = linear.bias
        self._product = packed_weight(linear, alike=alike)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        rows = x.numel() // self.in_features
        missing = self._fill(rows) - rows
        flat = x.reshape(rows, self.in_features)
        filled = nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat
        return self._product(filled)[:rows].view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True, slots=True)
class Packing:
    """What was replaced. `undo` puts the originals back."""

    layers: int
    undo: Callable[[], None]


@torch.inference_mode()
def pack(model: nn.Module, *, alike: bool = False) -> Packing:
    """Replace what can be replaced in `model`, which it mutates. Raises nothing.

    `alike`: what a row comes to must not depend on how many there are.
    """
    replaced: list[tuple[nn.Module, str, nn.Linear]] = []

    def undo() -> None:
        for parent, name, original in replaced:
            setattr(parent, name, original)

    if supported():
        try:
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if is_plain(child):
                        packed = PackedLinear(child, alike=alike)
                        if _agree(child, packed):
                            setattr(parent, name, packed)
                            replaced.append((parent, name, child))
        except RuntimeError:
            _log.warning("linear layers stay as they are: packing them failed", exc_info=True)
            undo()
            replaced.clear()
    return Packing(len(replaced), undo)


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
