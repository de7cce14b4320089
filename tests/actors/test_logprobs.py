"""Logprobs are finite, ordered, and of the logits as they were."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.logprobs import LEAST, Logprobs
from actors.request import Sampling, TokenLogprob
from actors.sampler import Draw, sample

values = st.lists(st.sampled_from([0.0, 1.0, -2.5, 3.0, float("-inf"), 1e4, -1e4]), min_size=1, max_size=12)


def told(logits: list[float], token: int, count: int) -> TokenLogprob:
    made = Logprobs(torch.tensor([logits]), [count]).of(0, token)
    assert made is not None
    return made


def test_only_who_asks_is_told() -> None:
    logprobs = Logprobs(torch.zeros(3, 4), [None, 0, 2])
    assert logprobs.of(0, 1) is None
    alone, more = logprobs.of(1, 1), logprobs.of(2, 3)
    assert alone is not None
    assert more is not None
    assert alone.logprob == more.logprob == pytest.approx(math.log(0.25))
    assert (alone.top, [token for token, _ in more.top]) == ((), [0, 1])


@settings(deadline=None)
@given(logits=values, count=st.integers(0, 14), data=st.data())
def test_any_logits_give_finite_numbers_in_order(logits: list[float], count: int, data: st.DataObject) -> None:
    if all(value == -math.inf for value in logits):
        logits[0] = 0.0
    token = data.draw(st.integers(0, len(logits) - 1))
    answer = told(logits, token, count)
    # By definition, in plain Python.
    total = max(logits) + math.log(sum(math.exp(value - max(logits)) for value in logits))
    expected = [max(LEAST, value - total) for value in logits]
    assert answer.logprob == pytest.approx(expected[token], abs=1e-3)
    assert len(answer.top) == min(count, len(logits))
    exact = told(logits, token, len(logits)).top
    assert answer.top == exact[:count], "fewer are the first of more"
    assert [token for token, _ in exact] == sorted(range(len(logits)), key=lambda i: (-dict(exact)[i], i))
    for number in (answer.logprob, *(value for _, value in answer.top)):
        assert math.isfinite(number)
        assert LEAST <= number <= 0
    assert dict(exact)[token] == answer.logprob


def test_equals_at_the_edge_go_to_the_lowest_ids() -> None:
    torch.manual_seed(0)
    logits = torch.zeros(50_000)
    logits[[40_000, 7, 30_000]] = torch.tensor([2.0, 1.0, 1.0])
    assert [token for token, _ in told(logits.tolist(), 0, 2).top] == [40_000, 7]
    assert [token for token, _ in told(logits.tolist(), 0, 6).top] == [40_000, 7, 30_000, 0, 1, 2]


def test_they_are_of_the_logits_before_sampling_changes_them() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    before = Logprobs(logits.clone(), [3]).of(0, 2)
    logprobs = Logprobs(logits, [3])
    assert sample(logits, [Draw(Sampling(1, temperature=0.0), 0, 0, forbidden=(1,))]) == [2]
    assert logprobs.of(0, 2) == before


def test_a_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 999)
    together = Logprobs(logits, [5] * 7)
    for row in range(7):
        assert together.of(row, row) == Logprobs(logits[row : row + 1], [5]).of(0, row)
