"""A decoder layer of the usual kind as four matrix products and four kernels, for bfloat16 on the CPU.

    x = x + o(attention(qkv(norm(x))))
    x = x + down(silu(gate(norm(x))) * up(norm(x)))

transformers computes this in forty operations and a dozen modules; with the few rows of a decode step those cost more than the
weights. Here q, k and v are one packed product, so are gate and up, and the additions are part of the products before them
(`packed_linear.py`); between them run the kernels of `fused_kernels.py`.

Which models have such layers is not read off their names: a layer is replaced if it has exactly these parts, and is then as
close to its own code in float32 as its own code in bfloat16 is. That is tried on rows so small that what the layer adds to them
is nearly all of the result: a factor or another activation shows. The caller compares the whole model afterwards; `undo` puts
the originals back.

Limits: RMS norms, SiLU, rotary embeddings of whole heads ("rotate half"), sizes that are multiples of 16 (half heads too).
Everything else stays with its own code.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from actors.attention import AttentionPort, LayerShape, plain_attention
from actors.fused_kernels import rms_norm, silu_product
from actors.kernels import bits_of
from actors.packed_linear import Packing, is_plain
from actors.packed_weight import packed_weight, supported
from actors.team import run, threads_for

_log = logging.getLogger(__name__)
_WORST_RATIO = 1.5
"""How much further from float32 than its own code a flat layer may be."""
_ROUNDING = 2.0**-7
"""What a result may be off in any case, relative: one code may happen to round luckily."""
_TRIES = 3
_SMALL = 0.03
"""Of the rows it is tried on; a norm's eps is still small beside their squares."""
_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm with `weight` [width], bfloat16."""

    weight: torch.Tensor
    eps_bits: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] to the same."""
        out = torch.empty_like(x)
        rows, width = x.shape
        addresses = (x.data_ptr(), self.weight.data_ptr(), out.data_ptr())
        run(rms_norm, threads_for(rows), *addresses, rows, width, self.eps_bits)
        return out


class FlatLayer(nn.Module):
    """Answers for `layer`. Finds its step behind `port`, as the model's own attention would."""

    def __init__(self, layer: Any, shape: LayerShape, index: int, port: AttentionPort, *, alike: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._port, self._shape, self._index = port, shape, index
        self._before_attention = _norm(layer.input_layernorm)
        self._before_mlp = _norm(layer.post_attention_layernorm)
        packed = partial(packed_weight, alike=alike)
        self._qkv = packed(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = packed(attention.o_proj)
        self._gate_up = packed(mlp.gate_proj, mlp.up_proj)
        self._down = packed(mlp.down_proj)
        self._inner = int(mlp.gate_proj.out_features)

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> torch.Tensor:
        """[1, rows, width] to the same; `position_embeddings` are cos and sin, [1, rows, head_dim]."""
        x = hidden_states[0]
        qkv = self._qkv(self._before_attention(x))
        assert self._port.flat is not None, "a layer computed outside a step"
        attended = self._port.flat(self._index, self._shape, qkv, *position_embeddings)
        x = self._o.added_to(attended, x)
        x = self._down.added_to(self._product(self._gate_up(self._before_mlp(x))), x)
        return x.unsqueeze(0)

    def _product(self, both: torch.Tensor) -> torch.Tensor:
        rows = both.shape[0]
        out = both.new_empty(rows, self._inner)
        run(silu_product, threads_for(rows), both.data_ptr(), out.data_ptr(), rows, self._inner)
        return out


def _norm(module: Any) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight.detach().contiguous(), bits_of(eps))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How a layer is called: with rows like `x` [1, rows, width], these cos and sin, and what else it is told."""

    x: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    others: dict[str, Any]


class LayerCalls:
    """Context manager: records the calls of the layers of `model` that may be flattened."""

    def __init__(self, model: nn.Module) -> None:
        self.candidates: list[tuple[nn.Module, str, Any]] = []
        if supported():
            self.candidates = [
                (parent, name, child)
                for parent in model.modules()
                for name, child in parent.named_children()
                if _looks_flat(child)
            ]
        self.calls: dict[int, LayerCall] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerCalls:
        for _, _, layer in self.candidates:
            self._hooks.append(layer.register_forward_hook(self._record, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, layer: Any, args: Any, kwargs: Any, result: Any) -> None:
        x = args[0] if args else kwargs.get("hidden_states")
        angles = kwargs.get("position_embeddings")
        others = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "position_embeddings")}
        usual = isinstance(x, torch.Tensor) and isinstance(result, torch.Tensor) and isinstance(angles, tuple)
        if usual and len(angles) == 2:
            self.calls[layer.self_attn.layer_idx] = LayerCall(x, angles, others)


def _looks_flat(layer: Any) -> bool:
    if set(dict(layer.named_children())) != _PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    found = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    found += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    linears = [one for one in found if is_plain(one)]
    if len(linears) < len(found) or not isinstance(getattr(attention, "layer_idx", None), int):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if not all(
        hasattr(norm, "weight") and (hasattr(norm, "variance_epsilon") or hasattr(norm, "eps")) for norm in norms
    ):
        return False
    if not _is_silu(getattr(mlp, "act_fn", None)):
        return False
    if any(isinstance(value, float) for value in vars(layer).values()):
        return False  # a factor of some kind
    known = [parameter for part in (*linears, *norms) for parameter in part.parameters()]
    groups = (linears[:3], linears[4:6])
    biased = [{one.bias is None for one in group} for group in groups]
    sizes = [size for one in linears for size in one.weight.shape]
    return (
        len(known) == len(list(layer.parameters()))
        and all(len(kinds) == 1 for kinds in biased)
        and all(size % 16 == 0 for size in sizes)
        and all(parameter.dtype == torch.bfloat16 for parameter in layer.parameters())
    )


@torch.inference_mode()
def flatten(
    recorded: LayerCalls, shapes: Mapping[int, LayerShape], port: AttentionPort, *, alike: bool = False
) -> Packing:
    """Replace the recorded layers that then compute the same. `shapes` by layer. Mutates the model; raises nothing.

    The port's attention must be at a step of as many rows as were recorded, all of one prompt and within every window.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent, name, layer in recorded.candidates:
        index = layer.self_attn.layer_idx
        call, shape = recorded.calls.get(index), shapes[index]
        if call is None or not _rotates_whole_heads(call, shape):
            continue
        try:
            flat = FlatLayer(layer, shape, index, port, alike=alike)
            agrees = _agree(layer, flat, call, shape, port)
        except Exception:  # sizes that do not fit together, an operator that refuses them: its own code serves it
            _log.debug("layer %d keeps its own code", index, exc_info=True)
            continue
        if agrees:
            setattr(parent, name, flat)
            replaced.append((parent, name, layer))

    def undo() -> None:
        for parent, name, original in replaced:
            setattr(parent, name, original)

    return Packing(len(replaced), undo)


def _rotates_whole_heads(call: LayerCall, shape: LayerShape) -> bool:
    half = shape.key_dim // 2
    return half % 16 == 0 and all(
        angle.dtype == torch.bfloat16 and angle.is_contiguous() and angle.shape == (1, call.x.shape[1], shape.key_dim)
        for angle in call.angles
    )


def _is_silu(activation: Any) -> bool:
    x = torch.linspace(-20, 20, 401)
    try:
        return torch.allclose(activation(x), nn.functional.silu(x), rtol=1e-5, atol=1e-6)
    except Exception:  # none, or one that takes something else
        return False


def _agree(layer: Any, flat: FlatLayer, call: LayerCall, shape: LayerShape, port: AttentionPort) -> bool:
    """Whether `flat` is about as far as `layer` itself from `layer` in float32."""
    generator = torch.Generator().manual_seed(1)
    wide = copy.deepcopy(layer).float()
    cos, sin = (angle.float() for angle in call.angles)
    own_errors, errors, size = 0.0, 0.0, 0.0
    for _ in range(_TRIES):
        x = (torch.randn(call.x.shape, generator=generator) * _SMALL).to(call.x.dtype)
        handler, port.handler = port.handler, partial(plain_attention, shape)
        try:
            own = layer(x, position_embeddings=call.angles, **call.others).float()
            exact = wide(x.float(), position_embeddings=(cos, sin), **call.others)
        finally:
            port.handler = handler
        found = flat(x, position_embeddings=call.angles).float()
        own_errors += float((own - exact).square().sum())
        errors += float((found - exact).square().sum())
        size += float(exact.square().sum())
    return errors <= max(_WORST_RATIO**2 * own_errors, _ROUNDING**2 * size)
