"""Every family is served right or refused at load: batched, chunked, with prefix hits and short windows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from actors.errors import ModelRefused
from actors.model import adopt
from actors.step import Piece
from tests.fakes.engine_rig import EngineRig
from tests.fakes.tiny_models import FAMILIES, REFUSED, first_real_mismatch, reference_tokens, tiny_model

_NEW_TOKENS = 16
_QUICK = {"gemma2", "gpt2", "gpt_oss", "llama", "mamba", "mistral", "qwen3_moe"}
"""Families that `make test-fast` runs too: one for each way the attention differs."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_tokens_equal_those_of_generate(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, FAMILIES[family])
    rng = random.Random(5)
    shared = [rng.randrange(3, 96) for _ in range(37)]
    prompts = [shared[:1], shared[:13], shared, [*shared, 7, 8], [rng.randrange(3, 96) for _ in range(40)]]
    wanted = [reference_tokens(model, prompt, _NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens, _ in wanted for token in tokens}) >= 8, (
        "the reference repeats itself: it proves nothing"
    )

    paged = adopt(model, family)
    try:
        with EngineRig(
            tmp_path, blocks=64, block_tokens=8, paged_model=paged, context_tokens=256, step_tokens=19, max_running=4
        ) as rig:
            for round_ in range(2):
                names = [f"{round_}-{index}" for index in range(len(prompts))]
                for name, prompt in zip(names, prompts, strict=True):
                    rig.submit(name, prompt, _NEW_TOKENS, ignore_eos=True)
                rig.wait(*names, timeout_s=60)
                for name, (tokens, gaps) in zip(names, wanted, strict=True):
                    assert len(rig.tokens[name]) == _NEW_TOKENS, rig.finished[name]
                    assert first_real_mismatch(rig.tokens[name], tokens, gaps) is None, name
            assert rig.cached["1-2"] == 32
            assert rig.cached["1-4"] == 39, "a prompt that is all cached computes its last token"
    finally:
        paged.unbind()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in sorted(REFUSED)]
)
def test_what_cannot_be_served_right_is_refused_with_the_reason(family: str) -> None:
    with pytest.raises(ModelRefused, match=f"{family} cannot be served: .{{20,}}"):
        adopt(tiny_model(family, REFUSED[family]), family)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(rope: str) -> None:
    model = tiny_model("llama", {})
    model.config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelRefused, match=rope):
        adopt(model, "m")


@pytest.mark.parametrize("window", [11, 40, 600])
@pytest.mark.parametrize("family", ["mistral", "olmoe", "llama", "qwen3_moe"])
def test_the_window_is_that_of_the_mask_whatever_else_is_said(family: str, window: int) -> None:
    # olmoe passes its config's window to attention, but its mask has none; llama has neither, whatever its config says.
    model = tiny_model(family, FAMILIES[family], sliding_window=window, max_position_embeddings=1024)
    masks_say = window if family in ("mistral",) else 0
    paged = adopt(model, family)
    assert paged._windows == [masks_say] * 3
    tokens = torch.randint(3, 96, (900,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        wanted = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        model.set_attn_implementation(paged._port.name)
    paged.bind(torch.zeros(60, *paged.geometry(16).shape))
    for start, end in ((0, 500), (500, 899), (899, 900)):
        got, _ = paged.forward([Piece(tokens[start:end], start, list(range(60)), True)])
        assert torch.allclose(got[0], wanted[end - 1], atol=1e-3), (start, end)
    paged.unbind()


def test_attention_that_computes_something_else_is_refused() -> None:
    model = tiny_model("llama", {})
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def scaled_only_when_eager(*args: object, **kwargs: object) -> object:
        out, weights = inner(*args, **kwargs)
        return (out * 3.0 if model.config._attn_implementation == "eager" else out), weights

    attention.forward = scaled_only_when_eager
    with pytest.raises(ModelRefused, match="differ from its own eager attention"):
        adopt(model, "m")
