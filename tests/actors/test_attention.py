"""The paged kernels against plain attention, over scattered blocks, for every option and element type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.attention import Options, PagedAttention
from actors.errors import ModelRefused
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
