"""Attention of chunks, on vectors and, where the CPU has them, on matrix tiles, against the same written out.

The way there, with rotation and pool, is tested in `test_fused_kernels.py`.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors import chunk_attention
from actors.chunk_attention import attend_chunk, fits
from actors.kernels import bits_of
from tests.actors.test_attention import plain
from tests.actors.torch_threads import torch_threads

SCALE = 0.3
NOBODY = 7.0


@pytest.fixture(scope="module", params=["tiles", "vectors"])
def products(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "vectors":
            patch.setattr(chunk_attention, "_attend_on_tiles", 0)
        elif not chunk_attention._attend_on_tiles:
            pytest.skip("this CPU, or its system, has no tiles of bfloat16")
        yield


@contextmanager
def new_memory_is_no_number() -> Iterator[None]:
    """What torch gives out unwritten is filled, in the mode in which it must not matter."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass
class Prompt:
    """One prompt's queries, keys and values, and a pool with them, in which all else is no number."""

    heads: int
    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    pool: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def of(cls, tokens: int, kv_heads: int, group: int, dim: int, block_tokens: int, seed: int) -> Prompt:
        torch.manual_seed(seed)
        count = -(-tokens // block_tokens)
        pool = torch.full((count + 3, 2, 2, kv_heads, block_tokens, dim), float("nan"), dtype=torch.bfloat16)
        blocks = torch.randperm(count + 3)[:count].contiguous()
        key, value = (torch.randn(tokens, kv_heads, dim).bfloat16() for _ in range(2))
        for position in range(tokens):
            there = pool[blocks[position // block_tokens], 1, :, :, position % block_tokens]
            there[0], there[1] = key[position], value[position]
        query = torch.randn(tokens, kv_heads * group, dim).bfloat16()
        return cls(kv_heads * group, key, value, query, pool, blocks)

    def attend(self, start: int, end: int, window: int = 0, softcap: float = 0.0, threads: int = 1) -> torch.Tensor:
        """What positions [start, end) get, [end - start, heads, dim]: behind two rows of others, which stay as they are."""
        _, kv_heads, dim = self.key.shape
        count, first_row = end - start, 2
        qkv = torch.full((first_row + count, (self.heads + 2 * kv_heads) * dim), float("nan"), dtype=torch.bfloat16)
        qkv[first_row:, : self.heads * dim] = self.query[start:end].flatten(1)
        cos, sin = torch.ones(first_row + count, dim).bfloat16(), torch.zeros(first_row + count, dim).bfloat16()
        out = torch.full((first_row + count, self.heads * dim), NOBODY, dtype=torch.bfloat16)
        blocks, layers, _, _, block_tokens, _ = self.pool.shape
        shape = (self.heads // kv_heads, self.pool.data_ptr(), blocks, layers, kv_heads, block_tokens, dim)
        told = array("q", (*shape, 1, bits_of(SCALE), window, bits_of(softcap)))
        rows_at = (qkv.data_ptr(), cos.data_ptr(), sin.data_ptr())
        place, seen = (first_row, count, start), (kv_heads, dim, window)
        with torch_threads(threads), new_memory_is_no_number():
            attend_chunk(rows_at, told.buffer_info()[0], self.blocks, place, seen, out)
        assert (out[:first_row] == NOBODY).all()
        return out[first_row:].view(count, self.heads, dim)

    def wanted(self, start: int, end: int, window: int, softcap: float) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1) for part in (self.query[start:end], self.key[:end], self.value[:end]))
        return plain(query, key, value, start, window, softcap).transpose(0, 1)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=30, deadline=None)
@given(
    span=st.tuples(st.integers(0, 600), st.integers(1, 70)),
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 3), st.sampled_from([32, 64, 96, 128]), st.sampled_from([16, 48])
    ),
    window=st.sampled_from([0, 1, 5, 33, 300]),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 1000),
)
@example(span=(0, 1), shape=(1, 1, 32, 16), window=0, softcap=0.0, seed=1)
@example(span=(0, 530), shape=(1, 3, 64, 16), window=0, softcap=0.0, seed=1)
@example(span=(255, 2), shape=(2, 2, 64, 16), window=256, softcap=0.0, seed=1)
def test_a_chunk_gets_what_plain_attention_gives(
    threads: int,
    span: tuple[int, int],
    shape: tuple[int, int, int, int],
    window: int,
    softcap: float,
    seed: int,
) -> None:
    """Over blocks whose other rows, and layers, are no numbers."""
    start, end = span[0], sum(span)
    prompt = Prompt.of(end, *shape, seed)
    got = prompt.attend(start, end, window, softcap, threads).double()
    assert torch.allclose(got, prompt.wanted(start, end, window, softcap), atol=3e-2)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("window", [0, 40, 300, 600])
@pytest.mark.parametrize("seed", [3, 4])
def test_what_a_token_gets_does_not_depend_on_how_its_prompt_was_cut(window: int, seed: int) -> None:
    prompt = Prompt.of(900, 2, 2, 64, 16, seed)
    whole = prompt.attend(0, 900, window)
    for cuts in ([0, 256, 512, 900], [0, 1, 17, 300, 599, 900], [0, 31, 320, 900], [0, 401, 900]):
        parts = [prompt.attend(a, b, window, threads=2) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole), cuts


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("size", [0.0, 30.0, 1e3, 1e5, 1e16])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_keys_weigh_the_same_however_far_apart(size: float, sign: int) -> None:
    """Whatever their score: the first of them may not fade with every strip that comes after it."""
    tokens = 16 * 1024
    prompt = Prompt.of(tokens, 1, 1, 32, 16, 5)
    prompt.query[:] = size
    prompt.pool[prompt.blocks, 1, 0] = sign
    prompt.pool[prompt.blocks[: len(prompt.blocks) // 2], 1, 1] = 1.0
    prompt.pool[prompt.blocks[len(prompt.blocks) // 2 :], 1, 1] = 0.0
    assert (prompt.attend(tokens - 1, tokens) == 0.5).all()
    prompt.pool[prompt.blocks[0], 1, 0] *= 2  # the first are all that counts, or do not count
    assert (prompt.attend(tokens - 1, tokens) == (1.0 if size * sign > 1 else 0.5)).all()


@pytest.mark.usefixtures("products")
def test_scores_of_any_size_are_weighed_and_what_is_no_number_shows() -> None:
    prompt = Prompt.of(300, 2, 1, 32, 16, 4)
    prompt.query *= 100  # one key is all that counts
    assert torch.allclose(prompt.attend(0, 300).double(), prompt.wanted(0, 300, 0, 0.0), atol=3e-2)
    block = prompt.blocks[2]
    prompt.pool[block, 1, 0, 0, 3, 5] = float("nan")  # of key 35, KV head 0
    broken = prompt.attend(30, 40)
    assert broken[5:, 0].isnan().all()
    assert not broken[:5].isnan().any()
    assert not broken[:, 1].isnan().any()


def test_what_does_not_fit_is_left_to_others() -> None:
    assert fits(16, 64, 64, 0.1)
    assert not fits(8, 64, 64, 0.1)
    assert not fits(16, 48, 48, 0.1)
    assert not fits(16, 64, 32, 0.1)
    assert not fits(16, 64, 64, -0.1)
