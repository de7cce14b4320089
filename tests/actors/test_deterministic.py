"""Deterministic replicas: the same bits whatever is computed beside, however prompts are cut, whatever is cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import packed_weight as packing
from actors.errors import ModelRefused
from actors.flat_layer import FlatLayer
from actors.model import PagedModel, adopt
from actors.packed_weight import SET_ROWS, fill_for, onednn_packs, packed_weight, set_rows
from actors.step import Piece
from tests.actors.torch_threads import torch_threads
from tests.fakes.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(not packing.supported(), reason="this torch or CPU packs no bfloat16")

BLOCK = 8
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32}


@pytest.fixture(scope="module")
def flat() -> PagedModel:
    model = adopt(tiny_model("llama", SIZES).to(torch.bfloat16), "flat", deterministic=True)
    assert any(isinstance(module, FlatLayer) for module in model._model.modules())
    return model


@pytest.fixture(scope="module")
def own() -> PagedModel:
    """Layers with their own code."""
    return adopt(tiny_model("qwen3", FAMILIES["qwen3"]).to(torch.bfloat16), "own", deterministic=True)


def last_logits(
    model: PagedModel, steps: list[list[tuple[int, int, int]]], prompts: list[list[int]]
) -> list[torch.Tensor]:
    """Of each prompt's last token. A step is a list of (prompt, start, end); blocks of a prompt lie where they lie."""
    blocks = [-(-len(prompt) // BLOCK) for prompt in prompts]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(len(steps))).tolist()
    tables = [[order.pop() for _ in range(count)] for count in blocks]
    model.bind(torch.zeros(sum(blocks), *model.geometry(BLOCK).shape, dtype=torch.bfloat16))
    found: dict[int, torch.Tensor] = {}
    for step in steps:
        logits, rows = model.forward([Piece(prompts[i][a:b], a, tables[i], True) for i, a, b in step])
        for row, piece in enumerate(rows):
            found[step[piece][0]] = logits[row].clone()
    model.unbind()
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize("which", ["flat", "own"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bits_depend_on_the_prompt_alone(which: str, data: st.DataObject, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(which)
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]
    alone = [last_logits(model, [[(0, 0, len(prompt))]], [prompt])[0] for prompt in prompts]
    cuts = [sorted({0, len(p), *data.draw(st.lists(st.integers(0, len(p)), max_size=3))}) for p in prompts]
    steps: list[list[tuple[int, int, int]]] = []
    while any(len(cut) > 1 for cut in cuts):
        ready = [i for i, cut in enumerate(cuts) if len(cut) > 1]
        chosen = data.draw(st.permutations(ready))[: data.draw(st.integers(1, len(ready)))]
        steps.append([(i, cuts[i][0], cuts[i][1]) for i in chosen])
        for i in chosen:
            del cuts[i][0]
    for found, expected in zip(last_logits(model, steps, prompts), alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("threads", [1, 2])
@given(rows=st.integers(1, 3), shape=st.sampled_from([(96, 64), (64, 192), (320, 48)]), seed=st.integers(0, 99))
def test_a_row_of_a_product_does_not_depend_on_its_place_or_neighbours(
    threads: int, rows: int, shape: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    unit = SET_ROWS if onednn_packs() else 1
    weight = packed_weight(torch.nn.Linear(*shape[::-1], bias=False).bfloat16(), alike=True)
    x, other = torch.randn(rows * unit, shape[1]).bfloat16(), torch.randn(rows * unit, shape[0]).bfloat16()
    order = torch.randperm(rows * unit)
    with torch.inference_mode(), torch_threads(threads):
        assert torch.equal(weight(x)[order], weight(x[order]))
        assert torch.equal(weight.added_to(x, other)[order], weight.added_to(x[order], other[order]))
        assert torch.equal(weight(x)[:unit], weight(x[:unit]))


def test_rows_are_filled_up_to_whole_products() -> None:
    assert [set_rows(rows) for rows in (1, 32, 33, 64, 65)] == [32, 32, 64, 64, 96]


def test_a_model_that_depends_on_its_company_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.model.fill_for", lambda *, alike: fill_for(alike=False))
    forward = PagedModel.forward

    def leaky(self: PagedModel, pieces: list[Piece]) -> tuple[torch.Tensor, list[int]]:
        logits, order = forward(self, pieces)
        return logits + 1e-3 * (len(pieces) - 1), order

    monkeypatch.setattr(PagedModel, "forward", leaky)
    with pytest.raises(ModelRefused, match="depend on what is computed beside them"):
        adopt(tiny_model("llama", SIZES).to(torch.bfloat16), "leaky", deterministic=True)
