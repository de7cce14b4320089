"""The product of rows with a weight in bfloat16 on vectors, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from actors import vector_panels
from actors.packed_weight import VectorWeight
from tests.actors.torch_threads import torch_threads


@pytest.mark.parametrize("threads", [1, 2, 3])
@given(
    rows=st.integers(0, 40),
    shape=st.sampled_from([(16, 16), (96, 64), (7, 5), (576, 1536), (321, 83)]),
    with_bias=st.booleans(),
    with_other=st.booleans(),
    alike=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
@example(rows=300, shape=(48, 1040), with_bias=True, with_other=True, alike=False, size=1.0)
def test_it_is_the_product_rounded_once(
    threads: int, rows: int, shape: tuple[int, int], with_bias: bool, with_other: bool, alike: bool, size: float
) -> None:
    outputs, inputs = shape
    torch.manual_seed(rows)
    weight, x = torch.randn(shape).bfloat16(), (torch.randn(rows, inputs) * size).bfloat16()
    bias = torch.randn(outputs).bfloat16() if with_bias else None
    other = torch.randn(rows, outputs).bfloat16() if with_other else None
    product = VectorWeight(weight, bias, alike=alike)
    with torch_threads(threads):
        found = product(x) if other is None else product.added_to(x, other)
    assert found.shape == (rows, outputs)
    assert found.is_contiguous()
    exact = x.double() @ weight.double().T
    exact += 0 if bias is None else bias.double()
    exact += 0 if other is None else other.double()
    # Sums in float32 are off by some of its roundings, of the size of what was added up.
    scale = x.double().abs() @ weight.double().abs().T
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * scale).all()


@pytest.mark.parametrize("threads", [1, 2])
@given(rows=st.integers(1, 150), inputs=st.sampled_from([48, 576, 1536]), seed=st.integers(0, 99))
def test_rows_that_must_be_alike_are_summed_the_same_in_any_company(
    threads: int, rows: int, inputs: int, seed: int
) -> None:
    torch.manual_seed(seed)
    product = VectorWeight(torch.randn(96, inputs).bfloat16(), torch.randn(96).bfloat16(), alike=True)
    x, other = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, 96).bfloat16()
    order, some = torch.randperm(rows), int(torch.randint(1, rows + 1, ()))
    with torch_threads(threads):
        whole, added = product(x), product.added_to(x, other)
        assert torch.equal(product(x[order]), whole[order])
        assert torch.equal(product(x[:some]), whole[:some])
        assert torch.equal(product(x[some - 1 : some]), whole[some - 1 : some])
        assert torch.equal(product.added_to(x[:some], other[:some]), added[:some])


def test_rows_need_not_lie_side_by_side() -> None:
    torch.manual_seed(4)
    product = VectorWeight(torch.randn(96, 64).bfloat16(), None, alike=False)
    x, other = torch.randn(6, 64).bfloat16(), torch.randn(6, 96).bfloat16()
    assert torch.equal(product(x[::2]), product(x[::2].clone()))
    assert torch.equal(product.added_to(x[::2], other[::2]), product.added_to(x[::2].clone(), other[::2].clone()))


def test_what_is_no_number_stays_in_its_row() -> None:
    product = VectorWeight(torch.ones(16, 64).bfloat16(), None, alike=False)
    x = torch.ones(9, 64).bfloat16()
    x[4, 7], x[6, 8] = float("nan"), float("inf")
    found = product(x)
    assert found[4].isnan().all()
    assert (found[6] == float("inf")).all()
    assert (found[[0, 1, 2, 3, 5, 7, 8]] == 64).all()


@pytest.mark.parametrize(("known", "enough"), [({"avx2", "fma"}, True), ({"avx2"}, False), (set(), False)])
def test_it_is_for_cpus_with_such_vectors(monkeypatch: pytest.MonkeyPatch, known: set[str], enough: bool) -> None:
    features = {name: name in known for name in ("avx2", "fma")}
    monkeypatch.setattr("actors.vector_panels.binding.get_host_cpu_features", lambda: features)
    assert vector_panels.usable() == enough
