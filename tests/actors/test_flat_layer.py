"""Layers are flattened where they are of the usual kind, and then compute what their own code does; others keep it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors import flat_layer, packed_weight
from actors.flat_layer import FlatLayer
from actors.model import PagedModel, adopt
from actors.step import Piece
from tests.fakes.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not packed_weight.supported(), reason="this torch or CPU packs no bfloat16")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32}
FLAT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 11},
    "qwen2": {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 1},
    "seed_oss": {},
}
OWN: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {}),
    ("glm", {}),
    ("granite", {"residual_multiplier": 0.4}),
    ("granite", {"residual_multiplier": 0.96}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"hidden_act": "relu"}),
    ("mixtral", {"num_local_experts": 4}),
    ("olmo2", {}),
    ("qwen2", {"hidden_act": "gelu"}),
    ("qwen3", {}),
]


def served(family: str, options: dict[str, Any]) -> tuple[PagedModel, Any]:
    """The model as served, and an untouched twin."""
    model = tiny_model(family, SIZES | options).to(torch.bfloat16)
    twin = tiny_model(family, SIZES | options).to(torch.bfloat16)
    return adopt(model, family), twin


def flat_layers(model: PagedModel) -> int:
    return sum(isinstance(module, FlatLayer) for module in model._model.modules())


def logits_of(model: PagedModel, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Of the last token of each chunk, computed one after the other."""
    pool = torch.zeros(-(-len(ids) // 8), *model.geometry(8).shape, dtype=torch.bfloat16)
    model.bind(pool)
    rows, start = [], 0
    for end in chunks:
        rows.append(model.forward([Piece(ids[start:end], start, list(range(len(pool)))[::-1], True)])[0][0])
        start = end
    model.unbind()
    return torch.stack(rows)


@pytest.mark.parametrize("family", FLAT)
def test_a_usual_layer_is_flattened_and_computes_the_same(family: str) -> None:
    model, twin = served(family, FLAT[family])
    assert flat_layers(model) == 3
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(5))
    chunks = [17, 30, 38, 39, 40]
    with torch.inference_mode():
        plain = twin(ids, use_cache=False).logits[0].float()[[end - 1 for end in chunks]]
        exact = twin.float()(ids, use_cache=False).logits[0][[end - 1 for end in chunks]]
    found = logits_of(model, ids[0].tolist(), chunks)
    assert (found - exact).norm() <= 1.5 * (plain - exact).norm()


@pytest.mark.parametrize(("family", "options"), OWN)
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_another_kind_of_layer_keeps_its_own_code(family: str, options: dict[str, Any], size: float) -> None:
    """However little it is another kind, and however little a layer adds to large embeddings."""
    model = tiny_model(family, SIZES | options)
    model.get_input_embeddings().weight.data.mul_(size)
    assert flat_layers(adopt(model.to(torch.bfloat16), family)) == 0


@pytest.mark.parametrize("options", [{"hidden_size": 136, "head_dim": 32}, {"head_dim": 16}, {"intermediate_size": 72}])
def test_sizes_that_the_kernels_do_not_take_keep_their_own_code(options: dict[str, Any]) -> None:
    model, _ = served("llama", options)
    assert flat_layers(model) == 0


def test_in_float32_nothing_is_flattened() -> None:
    assert flat_layers(adopt(tiny_model("llama", SIZES), "exact")) == 0


def test_a_layer_that_computes_something_else_keeps_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FlatLayer.forward

    def wrong(self: FlatLayer, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        found = forward(self, hidden_states, **kwargs)
        return found * (1.3 if self._index == 1 else 1.0)

    monkeypatch.setattr(FlatLayer, "forward", wrong)
    model, _ = served("llama", {})
    assert flat_layers(model) == 2


def test_a_model_that_then_computes_something_else_keeps_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_layer, "_agree", lambda *_: True)
    forward = FlatLayer.forward
    monkeypatch.setattr(FlatLayer, "forward", lambda self, x, **kwargs: -forward(self, x, **kwargs))
    model, _ = served("llama", {})
    assert flat_layers(model) == 0


def test_a_step_of_many_rows_and_one_of_few_agree() -> None:
    """Products and kernels choose other ways for many rows."""
    model, _ = served("llama", {})
    ids = torch.randint(0, 96, (200,), generator=torch.Generator().manual_seed(6)).tolist()
    at_once = logits_of(model, ids, [200])
    in_parts = logits_of(model, ids, [*range(9, 199, 9), 199, 200])[-1:]
    assert (at_once - in_parts).norm() <= 0.05 * at_once.norm()
