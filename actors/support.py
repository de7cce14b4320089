"""Which transformers models are served, and the reason for each that is not.

Two lines of defence against a silently wrong answer. Here: what can be read off the config and off the attention calls
the model was seen to make. In `actors.model`: a probe that compares the paged path, chunked and decoded, with the
model's own eager attention. A model is refused at load with one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.attention import LayerShape
from actors.errors import ModelRefused

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_config(config: Any) -> None:
    """Raise `ModelRefused` for what the config alone rules out."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused("it is an encoder-decoder; only decoder-only language models are served")
    for rope_type in _rope_types(config):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise ModelRefused(
                f"its rotary embedding is '{rope_type}', whose angles depend on the longest sequence of a batch"
            )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES)
    if others:
        raise ModelRefused(f"it has layers of type {', '.join(others)}, which keep no paged K and V")


def check_class(model: Any, parameters: Mapping[str, Any]) -> None:
    """Raise `ModelRefused` where the model class cannot run over our attention. `parameters` are those of its forward."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelRefused(
            f"{type(model).__name__} does not let its attention be replaced (no attention-backend support)"
        )
    if "position_ids" not in parameters:
        raise ModelRefused(f"{type(model).__name__} takes no position_ids, so requests cannot be batched together")


def check_layers(config: Any, layers: Mapping[int, LayerShape], calls: int) -> LayerShape:
    """Check the traced attention calls; return the shape that all layers share.

    Raises `ModelRefused` where a layer made no call (recurrent or shared state), layers differ, or K and V differ.
    """
    expected = int(config.num_hidden_layers)
    missing = sorted(set(range(expected)) - set(layers))
    if missing:
        raise ModelRefused(f"layers {missing[:4]} of {expected} make no attention call (recurrent or shared state)")
    if calls != expected or len(layers) != expected:
        raise ModelRefused(f"it makes {calls} attention calls for {expected} layers")
    shapes = {(layer.heads, layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers.values()}
    if len(shapes) > 1:
        raise ModelRefused(f"its layers differ in attention shape: {sorted(shapes)}")
    shape = layers[0]
    if shape.key_dim != shape.value_dim:
        raise ModelRefused(f"K and V have different head sizes ({shape.key_dim} and {shape.value_dim})")
    return shape


def _rope_types(config: Any) -> set[str]:
    found: set[str] = set()
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if not isinstance(settings, Mapping):
            continue
        for entry in (settings, *settings.values()):
            if isinstance(entry, Mapping):
                found.add(str(entry.get("rope_type", entry.get("type", "default"))))
    return found
