"""The kernels between the products of a flat layer, against the same written out in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import chunk_attention
from actors.attention import LayerShape, Options, PagedAttention
from actors.fused_kernels import rms_norm, silu_product
from actors.kernels import bits_of
from actors.step import Piece, build_step
from actors.team import run
from tests.actors.test_attention import plain
from tests.actors.torch_threads import torch_threads

EPS = 1e-5


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float = 1e-3) -> bool:
    """Whether bfloat16 `found` is `wanted` rounded once."""
    return torch.allclose(found.double(), wanted, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("threads", [1, 3])
@given(rows=st.integers(1, 70), width=st.sampled_from([16, 48, 576]), size=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm(threads: int, rows: int, width: int, size: float) -> None:
    torch.manual_seed(rows)
    x, weight = (torch.randn(rows, width) * size).bfloat16(), torch.randn(width).bfloat16()
    out = torch.full((rows, width), float("nan"), dtype=torch.bfloat16)
    run(rms_norm, threads, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, bits_of(EPS))
    wide = x.double()
    assert close(out, wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double())


@pytest.mark.parametrize("threads", [1, 3])
@given(rows=st.integers(1, 70), width=st.sampled_from([16, 48, 1536]), size=st.sampled_from([0.1, 5.0, 100.0]))
def test_silu_product(threads: int, rows: int, width: int, size: float) -> None:
    torch.manual_seed(rows)
    both = (torch.randn(rows, 2 * width) * size).bfloat16()
    out = torch.full((rows, width), float("nan"), dtype=torch.bfloat16)
    run(silu_product, threads, both.data_ptr(), out.data_ptr(), rows, width)
    gate, up = both.double().split(width, 1)
    assert close(out, gate / (1 + (-gate).exp()) * up)


@given(st.lists(st.floats(width=32), min_size=16, max_size=16))
def test_numbers_are_rounded_as_torch_does(numbers: list[float]) -> None:
    """With every kind of float32 that a product of bfloat16 can be."""
    gate = torch.full((1, 16), 1e4).bfloat16()  # of which silu is the identity
    up = torch.tensor([numbers]).bfloat16()
    both, out = torch.cat([gate, up], 1), torch.empty(1, 16, dtype=torch.bfloat16)
    run(silu_product, 1, both.data_ptr(), out.data_ptr(), 1, 16)
    wanted = (gate.float() * up.float()).bfloat16()
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(0.0), wanted.nan_to_num(0.0))


def test_silu_at_its_ends() -> None:
    ends = [-3.3e38, -1e30, -1e5, -200.0, -90.0, 0.0, 90.0, 1e5, 1e30, 3.3e38]
    gate = torch.tensor([ends * 2 + [float("nan"), float("inf")] * 6]).bfloat16()
    both, out = torch.cat([gate, torch.ones_like(gate)], 1), torch.empty_like(gate)
    run(silu_product, 1, both.data_ptr(), out.data_ptr(), 1, gate.shape[1])
    wanted = torch.nn.functional.silu(gate.double()).bfloat16()
    assert torch.allclose(out.float(), wanted.float(), rtol=2**-7, atol=1e-30, equal_nan=True)


def test_a_row_of_zeros_without_eps_spoils_no_other() -> None:
    """What is divided by zero is no number; those behind it are computed all the same."""
    x, weight = torch.ones(40, 64).bfloat16(), torch.ones(64).bfloat16()
    x[3] = 0
    out = torch.full_like(x, 7.0)
    run(rms_norm, 1, x.data_ptr(), weight.data_ptr(), out.data_ptr(), 40, 64, bits_of(0.0))
    assert out[3].isnan().all()
    assert (out[[row for row in range(40) if row != 3]] == 1).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    whole, alone = torch.empty_like(x), torch.empty_like(x[4:5])
    run(rms_norm, 2, x.data_ptr(), weight.data_ptr(), whole.data_ptr(), 9, 64, bits_of(EPS))
    run(rms_norm, 1, x[4:5].data_ptr(), weight.data_ptr(), alone.data_ptr(), 1, 64, bits_of(EPS))
    assert torch.equal(whole[4:5], alone)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [heads, n, d] at angles [n, d], float64, then rounded as the pool's element type."""
    first, second = x.double().chunk(2, -1)
    turned = x.double() * cos.double() + torch.cat([-second, first], -1) * sin.double()
    return turned.bfloat16().double()


@pytest.fixture(params=["tiles", "no tiles"])
def attention_of_chunks(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without matrix tiles."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "no tiles":
            patch.setattr(chunk_attention, "_attend_on_tiles", 0)
        elif not chunk_attention._attend_on_tiles:
            pytest.skip("this CPU, or its system, has no tiles of bfloat16")
        yield


@pytest.mark.usefixtures("attention_of_chunks")
@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.sampled_from([32, 64, 128]), st.integers(1, 4), st.integers(1, 3), st.sampled_from([4, 16])),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    filled=st.integers(0, 3),
    window=st.sampled_from([0, 5, 33]),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_rows_are_rotated_written_and_attended(
    threads: int,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    filled: int,
    window: int,
    softcap: float,
    seed: int,
) -> None:
    """Chunks, longer chunks over cached blocks, then one token each, in one step with rows that are nobody's."""
    dim, group, kv_heads, block_tokens = shape
    heads = group * kv_heads
    torch.manual_seed(seed)
    counts = [-(-length // block_tokens) for length in lengths]
    order = list(range(sum(counts)))
    random.Random(seed).shuffle(order)
    tables = [[order.pop() for _ in range(count)] for count in counts]
    pool = torch.full((sum(counts), 2, 2, kv_heads, block_tokens, dim), 1e4, dtype=torch.bfloat16)
    qkv = [torch.randn(length, (heads + 2 * kv_heads) * dim).bfloat16() for length in lengths]
    angles = torch.rand(max(lengths), dim) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    layer = LayerShape(heads, kv_heads, dim, dim, window, Options(0.3, softcap))
    attention = PagedAttention(pool, [0, window])
    done = [0] * len(lengths)
    for part in (0.4, 0.9, 1.0):
        spans = [(done[i], max(done[i], int(length * part))) for i, length in enumerate(lengths)]
        active = [i for i, (a, b) in enumerate(spans) if b > a]
        if not active:
            continue
        pieces = [Piece([0] * (spans[i][1] - spans[i][0]), spans[i][0], tables[i], True) for i in active]
        attention.step = build_step(pieces, block_tokens, lambda tokens: tokens + filled)
        by_kind = sorted(active, key=lambda i: spans[i][1] - spans[i][0] != 1)
        nothing = torch.zeros(filled, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        rows = torch.cat([*(qkv[i][slice(*spans[i])] for i in by_kind), nothing])
        at = attention.step.position_ids[0]
        with torch_threads(threads):
            out = attention.flat(1, layer, rows, cos[at][None], sin[at][None])
        assert (out[len(rows) - filled :] == 0).all()
        first = 0
        for i in by_kind:
            a, b = spans[i]
            query, key, value = (
                x.view(-1, n, dim).transpose(0, 1)
                for x, n in zip(
                    qkv[i].split([heads * dim, kv_heads * dim, kv_heads * dim], 1),
                    (heads, kv_heads, kv_heads),
                    strict=True,
                )
            )
            wanted = plain(
                rotated(query[:, a:b], cos[a:b], sin[a:b]),
                rotated(key[:, :b], cos[:b], sin[:b]),
                value[:, :b],
                a,
                window,
                softcap,
            )
            got = out[first : first + b - a].view(b - a, heads, dim).transpose(0, 1).double()
            assert torch.allclose(got, wanted, atol=4e-2), (part, i)
            first += b - a
            done[i] = b
    for i, length in enumerate(lengths):
        key, value = (x.view(-1, kv_heads, dim) for x in qkv[i][:, heads * dim :].split(kv_heads * dim, 1))
        for position in range(length):
            block, offset = tables[i][position // block_tokens], position % block_tokens
            wanted = rotated(key[position][:, None], cos[position : position + 1], sin[position : position + 1])[:, 0]
            assert torch.allclose(pool[block, 1, 0, :, offset].double(), wanted, rtol=2**-7, atol=1e-3)
            assert torch.equal(pool[block, 1, 1, :, offset], value[position])
    assert (pool[:, 0] == 1e4).all(), "another layer was touched"
