"""How far the served model's logits are from float32, against the model's own bfloat16 modules, on real prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.loader import resolve_model
from actors.model import PagedModel, load_model
from actors.progress import SilentProgress
from actors.step import Piece
from cluster.bench.workload import prompts
from tests.raycluster.server_process import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

WORKLOAD = ROOT.parent / "shared" / "traces" / "bbh.json.gz"
PROMPTS = 50
LONGEST = 800
BLOCK = 16


def own_logits(path: Path, dtype: torch.dtype, texts: list[list[int]]) -> torch.Tensor:
    """[prompts, vocab] float32 of each last token, by transformers' own modules."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    with torch.inference_mode():
        rows = [model(torch.tensor([text]), logits_to_keep=1).logits[0, -1].float() for text in texts]
    return torch.stack(rows)


def served_logits(model: PagedModel, texts: list[list[int]]) -> torch.Tensor:
    """The same by the served model: a chunk, a cached chunk, and a decode of the last token."""
    blocks = -(-LONGEST // BLOCK)
    model.bind(torch.zeros(blocks, *model.geometry(BLOCK).shape, dtype=torch.bfloat16))
    rows = []
    for text in texts:
        for start, end in ((0, 256), (256, len(text) - 1), (len(text) - 1, len(text))):
            if start < end:
                logits, _ = model.forward([Piece(text[start:end], start, list(range(blocks)), True)])
        rows.append(logits[0].clone())
    model.unbind()
    return torch.stack(rows)


@pytest.mark.parametrize("deterministic", [False, True])
def test_served_logits_are_about_as_close_to_float32_as_the_models_own(
    deterministic: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if not WORKLOAD.exists():
        pytest.skip(f"the workload {WORKLOAD.name} is not beside the repository")
    path = resolve_model("demo", SilentProgress()).path
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    texts = [tokenizer.encode(text)[-LONGEST:] for text in prompts(WORKLOAD, PROMPTS, 3)]
    exact = own_logits(path, torch.float32, texts)
    plain = (own_logits(path, torch.bfloat16, texts) - exact).abs()
    served = (served_logits(load_model(path, "demo", "fast", deterministic=deterministic), texts) - exact).abs()
    with capsys.disabled():
        print(
            f"\nmax logit error {served.max():.3f} served, {plain.max():.3f} plain bfloat16; "
            f"mean {served.mean():.4f}, {plain.mean():.4f}; {len(texts)} prompts"
        )
    assert served.max() <= 1.5 * plain.max()
