"""The product of a few rows with a packed weight, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors import panels
from actors.packed_weight import PackedWeight, onednn_packs
from tests.actors.torch_threads import torch_threads

needs_onednn = pytest.mark.skipif(not onednn_packs(), reason="oneDNN packs no bfloat16 for this CPU")


def packed(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return found


@pytest.fixture(scope="module", params=[True, False])
def most_rows(request: pytest.FixtureRequest) -> Iterator[int]:
    """With and without matrix tiles."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(panels, "MOST_ROWS", panels._FEW)
            patch.setattr(panels, "_multiply_tiles", 0)
        yield panels.MOST_ROWS


@pytest.mark.parametrize("threads", [1, 2, 3])
@given(
    rows=st.integers(0, panels.MOST_ROWS),
    shape=st.sampled_from([(32, 32), (96, 64), (576, 1536), (320, 96)]),
    with_bias=st.booleans(),
    with_other=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_it_is_the_product_rounded_once(
    most_rows: int, threads: int, rows: int, shape: tuple[int, int], with_bias: bool, with_other: bool, size: float
) -> None:
    outputs, inputs = shape
    rows = min(rows, most_rows)
    torch.manual_seed(rows)
    weight, x = torch.randn(shape).bfloat16(), (torch.randn(rows, inputs) * size).bfloat16()
    bias = torch.randn(outputs).bfloat16() if with_bias else None
    other = torch.randn(rows, outputs).bfloat16() if with_other else None
    laid_out = weight.view(outputs // panels.PANEL, panels.PANEL, inputs // 2, 2).transpose(1, 2).contiguous()
    with torch_threads(threads):
        found = panels.multiply(x, laid_out.data_ptr(), bias, other, outputs)
    exact = x.double() @ weight.double().T
    exact += 0 if bias is None else bias.double()
    exact += 0 if other is None else other.double()
    # Sums in float32 are off by some of its roundings, of the size of what was added up.
    scale = x.double().abs() @ weight.double().abs().T
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * scale).all()


@needs_onednn
def test_another_layout_is_not_taken_for_this_one() -> None:
    torch.manual_seed(1)
    weight = torch.randn(96, 64).bfloat16()
    held = packed(weight)
    if not panels.address_of(held, weight):
        pytest.skip("oneDNN has another layout on this CPU")
    changed = weight.clone()
    changed[95, 63] += 1
    assert panels.address_of(held, changed) == 0
    assert panels.address_of(held, weight[:64]) == 0
    odd = torch.randn(80, 48).bfloat16()
    assert panels.address_of(packed(odd), odd) == 0


@needs_onednn
def test_without_its_layout_a_weight_computes_the_same_with_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    weight, x, other = torch.randn(96, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(3, 96).bfloat16()
    monkeypatch.setattr(panels, "address_of", lambda *_: 0)
    product = PackedWeight(weight, None, alike=False)
    monkeypatch.setattr(panels, "multiply", None)  # which it must not call
    with torch.inference_mode():
        exact = x.double() @ weight.double().T
        assert torch.allclose(product(x).double(), exact, rtol=2**-7, atol=1e-2)
        assert torch.allclose(product.added_to(x, other).double(), exact + other.double(), rtol=2**-7, atol=1e-2)


@needs_onednn
def test_rows_need_not_lie_side_by_side() -> None:
    torch.manual_seed(4)
    product = PackedWeight(torch.randn(96, 64).bfloat16(), None, alike=False)
    x, other = torch.randn(6, 64).bfloat16(), torch.randn(6, 96).bfloat16()
    with torch.inference_mode():
        assert torch.equal(product(x[::2]), product(x[::2].clone()))
        assert torch.equal(product.added_to(x[::2], other[::2]), product.added_to(x[::2].clone(), other[::2].clone()))


@needs_onednn
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_a_cpu_without_tiles_multiplies_four_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    torch.manual_seed(5)
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    monkeypatch.setattr(panels, "MOST_ROWS", panels._FEW)
    monkeypatch.setattr(panels, "_multiply_tiles", 0)
    with torch.inference_mode():
        found = PackedWeight(weight, None, alike=False)(x)
    assert torch.allclose(found.double(), x.double() @ weight.double().T, rtol=2**-7, atol=1e-2)


@needs_onednn
def test_many_rows_are_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    weight = torch.randn(96, 64).bfloat16()
    product = PackedWeight(weight, None, alike=False)
    monkeypatch.setattr(panels, "multiply", None)
    x = torch.randn(panels.MOST_ROWS + 1, 64).bfloat16()
    with torch.inference_mode():
        assert torch.allclose(product(x).double(), x.double() @ weight.double().T, rtol=2**-7, atol=1e-2)


@needs_onednn
@pytest.mark.parametrize("with_tiles", [True, False])
def test_sets_of_rows_never_depend_on_their_number(monkeypatch: pytest.MonkeyPatch, with_tiles: bool) -> None:
    torch.manual_seed(6)
    if not with_tiles:
        monkeypatch.setattr(panels, "MOST_ROWS", panels._FEW)
        monkeypatch.setattr(panels, "_multiply_tiles", 0)
    product = PackedWeight(torch.randn(96, 576).bfloat16(), torch.randn(96).bfloat16(), alike=True)
    assert with_tiles or not product._panels
    x, other = torch.randn(320, 576).bfloat16(), torch.randn(320, 96).bfloat16()
    with torch.inference_mode():
        whole, added = product(x), product.added_to(x, other)
        for first, count in ((0, 32), (32, 64), (96, 96), (192, 128)):
            part = slice(first, first + count)
            assert torch.equal(product(x[part]), whole[part])
            assert torch.equal(product.added_to(x[part], other[part]), added[part])
        order = torch.randperm(320)
        assert torch.equal(product(x[order]), whole[order])
