"""Tiny random models of many families, lively enough that a wrong attention shows in the tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_HEAD: dict[str, Any] = {"head_dim": 8}
_WINDOW: dict[str, Any] = {"sliding_window": 11}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {**_HEAD, **_WINDOW},
    "ernie4_5": _HEAD,
    "exaone4": _WINDOW,
    "gemma": _HEAD,
    "gemma2": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 8},
    "glm": _HEAD,
    "glm4": _HEAD,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "granite": {},
    "helium": _HEAD,
    "llama": {},
    "mistral": _WINDOW,
    "mixtral": {**_WINDOW, "num_local_experts": 4},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": _WINDOW,
    "qwen2": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, **_EXPERTS},
    "seed_oss": _HEAD,
    "smollm3": _HEAD,
    "starcoder2": _WINDOW,
}
"""Families that are served, with what their tiny config needs beside the base."""

REFUSED: dict[str, dict[str, Any]] = {
    "bloom": {},
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "falcon": {},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    "gpt_oss": {**_HEAD, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64},
    "mamba": {},
    "mpt": {},
    "qwen3_next": {},
    "stablelm": {},
}
"""Families that must be refused at load."""


def tiny_model(family: str, options: dict[str, Any], *, seed: int = 0, **extra: Any) -> Any:
    """A random float32 model of `family`. Weights are large enough to give varied tokens; norms stay as initialised."""
    settings = {**_BASE, **options, **extra}
    if family == "gpt2":
        settings = {
            k: v for k, v in settings.items() if k not in ("hidden_size", "num_key_value_heads", "intermediate_size")
        }
    config = CONFIG_MAPPING[family](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def reference_tokens(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """What `model.generate` gives greedily after `prompt`, and for each token the gap between its two best logits."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    top = torch.stack(out.logits).float()[:, 0].topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist()


def first_real_mismatch(got: list[int], wanted: list[int], gaps: list[float], tie: float = 1e-4) -> int | None:
    """Index of the first differing token, or None; a difference where the reference itself is a near tie ends the comparison."""
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if ours != theirs:
            return None if gaps[index] < tie else index
    return None
