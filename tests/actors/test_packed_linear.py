"""Packed linear layers compute what plain ones do, or are not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from actors import packed_linear, packed_weight
from actors.model import adopt
from actors.packed_linear import PackedLinear, pack
from tests.fakes.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(not packed_weight.supported(), reason="this torch or CPU packs no bfloat16")


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Sequential(nn.Linear(96, 40, bias=False))).to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 130])
def test_the_result_is_about_as_close_to_float32_as_the_plain_one(rows: int) -> None:
    model = net()
    x = torch.randn(2, rows, 48).to(torch.bfloat16)
    reference = net(torch.float32)
    reference.load_state_dict(model.state_dict())
    with torch.inference_mode():
        wanted, plain = reference(x.float()), model(x)
        packing = pack(model)
        packed = model(x)
    assert packing.layers == 2
    assert packed.shape == plain.shape
    assert packed.dtype == torch.bfloat16
    assert (packed.float() - wanted).abs().mean() <= 2 * (plain.float() - wanted).abs().mean()


def test_few_numbers_of_rows_are_computed_and_none_with_many_more() -> None:
    padded = [packed_weight.padded_rows(rows) for rows in range(1, 4097)]
    assert all(rows <= filled <= 1.25 * rows for rows, filled in enumerate(padded, 1))
    assert padded[:8] == list(range(1, 9))
    assert padded == sorted(padded)
    assert len(set(padded[:256])) == 28
    assert all(packed_weight.padded_rows(filled) == filled for filled in padded)


def test_what_is_filled_up_changes_no_row() -> None:
    model = net()
    pack(model)
    x = torch.randn(1, 64, 48).to(torch.bfloat16)
    with torch.inference_mode():
        whole = model(x)
        for rows in (9, 13, 33, 47):
            assert torch.allclose(model(x[:, :rows]), whole[:, :rows], atol=1e-2), rows


@pytest.mark.parametrize("alike", [False, True])
def test_no_rows_are_no_rows(alike: bool) -> None:
    """A step whose chunks all go on wants no logits."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).bfloat16()
    assert pack(model, alike=alike).layers == 2
    with torch.inference_mode():
        assert model(torch.empty(1, 0, 64, dtype=torch.bfloat16)).shape == (1, 0, 64)


def test_undo_gives_the_same_bits_back() -> None:
    model = net()
    x = torch.randn(3, 48).to(torch.bfloat16)
    before = model(x)
    packing = pack(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    packing.undo()
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert torch.equal(model(x), before)


def test_float32_subclasses_and_hooked_layers_stay() -> None:
    class Special(nn.Linear):
        pass

    hooked = nn.Linear(16, 16).to(torch.bfloat16)
    hooked.register_forward_hook(lambda *args: None)
    model = nn.Sequential(Special(16, 16).to(torch.bfloat16), hooked, nn.Linear(16, 16))
    assert pack(model).layers == 0


def test_shape_and_type_can_be_asked_for() -> None:
    model = net()
    pack(model)
    assert isinstance(model[0], PackedLinear)
    assert (model[0].weight.dtype, tuple(model[0].weight.shape)) == (torch.bfloat16, (96, 48))
    assert (model[0].in_features, model[0].out_features) == (48, 96)


def test_a_layer_that_differs_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: forward(self, x) + (self.out_features == 40))
    model = net()
    assert pack(model).layers == 1
    assert [type(module) for module in model.modules()].count(nn.Linear) == 1


def test_a_model_that_then_computes_something_else_is_served_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    real_pack = pack

    def wrong(model: Any, **options: Any) -> packed_linear.Packing:
        packing = real_pack(model, **options)
        for module in model.modules():
            if isinstance(module, PackedLinear):
                monkeypatch.setattr(
                    module, "forward", lambda x, size=module.out_features: x.new_ones(*x.shape[:-1], size)
                )
        return packing

    monkeypatch.setattr("actors.model.pack", wrong)
    model = tiny_model("llama", FAMILIES["llama"]).to(torch.bfloat16)
    adopt(model, "tiny")
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_real_model_is_packed() -> None:
    model = tiny_model("llama", FAMILIES["llama"]).to(torch.bfloat16)
    adopt(model, "tiny")
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) > 5


def test_a_missing_operator_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "supported", lambda: False)
    assert pack(net()).layers == 0
