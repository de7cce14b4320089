"""The paged kernels against plain attention, over scattered blocks, for every option and element type."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from actors import kernels
from actors.attention import Options, PagedAttention
from actors.errors import ModelRefused
from actors.kernels import decode_attention
from actors.lanes import bounded, exp, load, store
from actors.step import Piece, build_step

_BLOCK_TOKENS = 4
_HEADS, _KV_HEADS, _DIM = 4, 2, 8


class Layer:
    """What a transformers attention module shows us."""

    layer_idx = 0
    is_causal = True


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, window: int, softcap: float
) -> torch.Tensor:
    """Attention written out: query [heads, n, d] at positions start.., key and value [kv_heads, m, d], float64."""
    group = query.shape[0] // key.shape[0]
    scores = query.double() @ key.double().repeat_interleave(group, 0).transpose(1, 2) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(start, start + query.shape[1])[:, None]
    columns = torch.arange(key.shape[1])[None]
    hidden = columns > rows
    if window:
        hidden |= columns <= rows - window
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.double().repeat_interleave(group, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 100])
def test_chunks_and_decodes_equal_plain_attention(dtype: torch.dtype, softcap: float, window: int) -> None:
    torch.manual_seed(3)
    lengths = [1, 5, 14, 23]
    pool = torch.full((32, 1, 2, _KV_HEADS, _BLOCK_TOKENS, _DIM), 1e4, dtype=dtype)
    free = torch.randperm(32).tolist()
    tables = [[free.pop() for _ in range(-(-length // _BLOCK_TOKENS))] for length in lengths]
    states = [
        tuple(torch.randn(heads, length, _DIM).to(dtype) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
        for length in lengths
    ]
    attention = PagedAttention(pool, [window])
    # Three steps: first chunks, then longer chunks over cached blocks, then one token each, all sequences together.
    done = [0] * len(lengths)
    for part in (0.4, 0.9, 1.0):
        spans = [(done[i], max(done[i], int(length * part))) for i, length in enumerate(lengths)]
        active = [i for i, (a, b) in enumerate(spans) if b > a]
        pieces = [Piece([0] * (spans[i][1] - spans[i][0]), spans[i][0], tables[i], True) for i in active]
        step = build_step(pieces, _BLOCK_TOKENS)
        by_kind = sorted(active, key=lambda i: spans[i][1] - spans[i][0] != 1)
        query, key, value = (
            torch.cat([states[i][kind][:, slice(*spans[i])] for i in by_kind], 1)[None] for kind in range(3)
        )
        attention.step = step
        out, _ = attention(Layer(), query, key, value, None, scaling=0.3, sliding_window=99, softcap=softcap or None)
        assert out.shape == (1, query.shape[2], _HEADS, _DIM)
        at = 0
        for i in by_kind:
            a, b = spans[i]
            wanted = plain(states[i][0][:, a:b], states[i][1][:, :b], states[i][2][:, :b], a, window, softcap)
            got = out[0, at : at + b - a].transpose(0, 1).double()
            assert torch.allclose(got, wanted, atol=2e-6 if dtype == torch.float32 else 4e-2), (part, i)
            at += b - a
            done[i] = b
    assert done == lengths


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_causal": False}, "not causal"),
        ({"s_aux": torch.zeros(1)}, "s_aux"),
        ({"position_bias": torch.zeros(1), "indices": 3}, "indices, position_bias"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelRefused, match=words):
        Options.read(Layer(), 8, options)


def test_options_that_say_nothing_are_ignored() -> None:
    options = {"dropout": 0.0, "position_ids": torch.zeros(1), "output_attentions": False, "cu_seq_lens_q": None}
    assert Options.read(Layer(), 16, options) == Options(0.25, 0.0)


def _exp_of(x: Any, out: Any) -> None:
    store(out, 0, exp(load(x, 0)))


def _bounded_of(x: Any, cap: Any, out: Any) -> None:
    store(out, 0, bounded(load(x, 0), cap))


exp_of, bounded_of = njit(_exp_of), njit(_bounded_of)
_any_float32 = st.lists(st.floats(width=32), min_size=16, max_size=16)


@given(_any_float32)
def test_exp_equals_exp(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    out = np.empty_like(x)
    exp_of(x, out)
    inside = (x >= -87) & (x <= 88)
    assert np.allclose(out[inside], np.exp(x[inside].astype(np.float64)), rtol=1e-6, atol=0)
    assert (out[x < -87] == 0).all()
    assert np.allclose(out[x > 88], np.exp(88.0), rtol=1e-6)
    assert np.isnan(out[np.isnan(x)]).all()


def test_exp_is_accurate_all_along_its_range() -> None:
    out = np.empty(16, np.float32)
    for x in np.linspace(-87, 88, 16 * 4000, dtype=np.float32).reshape(-1, 16):
        exp_of(x, out)
        assert np.allclose(out, np.exp(x.astype(np.float64)), rtol=1e-6, atol=0)


@given(_any_float32, st.sampled_from([0.5, 30.0, 50.0]))
def test_a_softcap_bounds_every_score(numbers: list[float], cap: float) -> None:
    x = np.array(numbers, np.float32)
    out = np.empty_like(x)
    bounded_of(x, np.float32(cap), out)
    wanted = cap * np.tanh(x.astype(np.float64) / cap)
    assert np.allclose(out, wanted, rtol=1e-6, atol=cap * 5e-7, equal_nan=True)


_shapes = st.tuples(
    st.sampled_from([8, 16, 24, 64, 80, 128]),  # head_dim
    st.integers(1, 8),  # query heads per KV head
    st.integers(1, 3),  # KV heads
    st.integers(1, 32),  # tokens of a block
)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["float32", "bfloat16_by_tiles", "bfloat16_by_pairs"])
@given(
    shape=_shapes,
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 5, 16, 33]),
    softcap=st.sampled_from([0.0, 2.0]),
    sharpness=st.sampled_from([0.1, 3.0]),
    seed=st.integers(0, 1000),
)
def test_decoding_equals_plain_attention_for_every_shape(
    threads: int,
    kind: str,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    window: int,
    softcap: float,
    sharpness: float,
    seed: int,
) -> None:
    head_dim, group, kv_heads, block_tokens = shape
    torch.manual_seed(seed)
    counts = [-(-length // block_tokens) for length in lengths]
    # What no request has written may hold anything.
    pool = torch.full((sum(counts) + 1, 2, 2, kv_heads, block_tokens, head_dim), float("nan"))
    order = list(range(sum(counts) + 1))
    random.Random(seed).shuffle(order)
    tables = np.full((len(lengths), max(counts)), -1, np.int64)
    keys, values = [], []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[i, :count] = [order.pop() for _ in range(count)]
        keys.append((torch.randn(kv_heads, length, head_dim) * sharpness).bfloat16().float())
        values.append(torch.randn(kv_heads, length, head_dim).bfloat16().float())
        for position in range(length):
            block, offset = tables[i, position // block_tokens], position % block_tokens
            pool[block, 1, 0, :, offset] = keys[-1][:, position]
            pool[block, 1, 1, :, offset] = values[-1][:, position]
    query = torch.randn(len(lengths), group * kv_heads, head_dim)
    out = torch.empty_like(query)
    array = pool.numpy() if kind == "float32" else pool.bfloat16().view(torch.uint16).numpy()
    with pytest.MonkeyPatch.context() as patch:
        if kind != "float32":  # this CPU's kernel for bfloat16, and the other one
            patch.setattr(kernels, "_bfloat16", getattr(kernels, f"_{kind}"))
        decode_attention(query.numpy(), array, 1, tables, np.array(lengths), 0.3, window, softcap, out.numpy(), threads)
    for i, length in enumerate(lengths):
        wanted = plain(query[i, :, None], keys[i], values[i], length - 1, window, softcap)[:, 0]
        assert torch.allclose(out[i].double(), wanted, atol=5e-5 if sharpness > 1 else 5e-6)


def test_a_key_that_is_no_number_shows() -> None:
    """A broken token must not pass as a good answer, and must not leak into other heads."""
    pool = np.zeros((2, 1, 2, 2, 16, 64), np.float32)
    pool[1, 0, 0, 0, 3] = np.nan
    query, out = np.ones((1, 4, 64), np.float32), np.empty((1, 4, 64), np.float32)
    decode_attention(query, pool, 0, np.array([[1, 0]]), np.array([20]), 0.1, 0, 0.0, out, 1)
    assert np.isnan(out[0, :2]).all()
    assert (out[0, 2:] == 0).all()


def test_scores_beyond_all_bounds_spoil_no_other_sequence() -> None:
    pool = np.zeros((4, 1, 2, 1, 16, 64), np.float32)
    pool[0, 0, 0] = 1e37
    pool[1:, 0, 1] = 1.0
    query, out = np.full((4, 1, 64), -1.0, np.float32), np.full((4, 1, 64), 7.0, np.float32)
    decode_attention(query, pool, 0, np.arange(4)[:, None], np.full(4, 16), 1.0, 0, 0.0, out, 1)
    assert np.allclose(out[1:], 1.0)


def test_prompts_are_attended_in_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the code that it compiles for each size in bfloat16: with every length a process would grow for ever."""
    sizes: set[tuple[int, int]] = set()
    attend = F.scaled_dot_product_attention

    def seen(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sizes.add((query.shape[2], key.shape[2]))
        return attend(query, key, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    pool = torch.zeros(32, 1, 2, _KV_HEADS, _BLOCK_TOKENS, _DIM, dtype=torch.bfloat16)
    attention = PagedAttention(pool, [0])
    for start in (0, 3, 16, 50):
        for count in range(2, 70):
            attention.step = build_step([Piece([0] * count, start, list(range(32)), True)], _BLOCK_TOKENS)
            query, key = (torch.randn(1, heads, count, _DIM).bfloat16() for heads in (_HEADS, _KV_HEADS))
            attention(Layer(), query, key, key, None, scaling=0.3)
    assert sizes == {(rows, rows) for rows in (32, 64, 96)} | {(rows, keys) for rows, keys in sizes if keys % 64 == 0}
    assert len(sizes) <= 9
