"""Penalties: what each does, and that rows together get what they get alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.penalties import Seen, penalise
from actors.request import Sampling

VOCAB = 12


def penalised(logits: list[float], sampling: Sampling, prompt: list[int], answer: list[int]) -> list[float]:
    seen = Seen(sampling, prompt)
    seen.catch_up([*prompt, *answer])
    row = torch.tensor([logits])
    penalise(row, [(0, seen)])
    return row[0].tolist()


def test_presence_counts_once_and_frequency_each_time_and_the_prompt_not_at_all() -> None:
    logits = [1.0, 1.0, -1.0, 1.0]
    assert penalised(logits, Sampling(1, presence_penalty=0.5), [3], [0, 0, 2]) == [0.5, 1.0, -1.5, 1.0]
    assert penalised(logits, Sampling(1, frequency_penalty=0.5), [3], [0, 0, 2]) == [0.0, 1.0, -1.5, 1.0]
    both = Sampling(1, frequency_penalty=-0.5, presence_penalty=-1.0)
    assert penalised(logits, both, [3], [0, 0, 2]) == [3.0, 1.0, 0.5, 1.0]


def test_repetition_divides_or_multiplies_by_sign_in_prompt_and_answer() -> None:
    logits = [1.0, 3.0, -1.0, -3.0, 0.0]
    assert penalised(logits, Sampling(1, repetition_penalty=2.0), [0, 0, 2], [4]) == [0.5, 3.0, -2.0, -3.0, 0.0]
    assert penalised(logits, Sampling(1, repetition_penalty=0.5), [0], [2]) == [2.0, 3.0, -0.5, -3.0, 0.0]


def test_repetition_comes_before_the_others() -> None:
    sampling = Sampling(1, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    assert penalised([4.0, 4.0, 4.0], sampling, [1], [0, 0]) == [0.5, 2.0, 4.0]


def test_nothing_seen_changes_nothing() -> None:
    assert penalised([1.0, 2.0], Sampling(1, presence_penalty=1.0), [0, 1], []) == [1.0, 2.0]


@pytest.mark.parametrize("value", [float("-inf"), float("inf")])
def test_infinite_logits_stay_what_they_are(value: float) -> None:
    sampling = Sampling(1, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    assert penalised([value, 0.0], sampling, [0], [0]) == [value, 0.0]


def test_a_request_without_penalties_has_nothing_to_remember() -> None:
    assert Seen.of(Sampling(1), [1, 2]) is None
    for some in (Sampling(1, presence_penalty=-1), Sampling(1, frequency_penalty=1), Sampling(1, repetition_penalty=2)):
        assert Seen.of(some, [1, 2]) is not None


def naive(logits: list[float], sampling: Sampling, prompt: list[int], answer: list[int]) -> list[float]:
    """One token after the other, in plain Python but for the rounding to float32."""
    row = torch.tensor(logits)
    for token in range(len(logits)):
        if token in prompt or token in answer:
            repetition = torch.tensor(sampling.repetition_penalty, dtype=torch.float32)
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        if token in answer:
            row[token] -= answer.count(token) * torch.tensor(sampling.frequency_penalty, dtype=torch.float32)
            row[token] -= torch.tensor(sampling.presence_penalty, dtype=torch.float32)
    return row.tolist()


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=200)
penalties = st.floats(-2, 2, width=32)
samplings = st.builds(
    Sampling,
    st.just(1),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
)
rows = st.lists(st.tuples(samplings, tokens, tokens, st.lists(st.integers(0, 200), max_size=4)), min_size=1, max_size=5)


@settings(deadline=None)
@given(rows, st.integers(0, 2**32))
def test_any_rows_together_get_what_each_gets_by_the_book(
    rows: list[tuple[Sampling, list[int], list[int], list[int]]], seed: int
) -> None:
    """However many steps lie between two looks at what was generated."""
    logits = torch.randn(len(rows) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    before, expected, penalised_rows = logits.clone(), [], []
    for row, (sampling, prompt, answer, looks) in enumerate(rows):
        seen = Seen(sampling, prompt)
        for length in sorted(min(look, len(answer)) for look in looks):
            seen.catch_up(prompt + answer[:length])
        seen.catch_up(prompt + answer)
        penalised_rows.append((row, seen))
        expected.append(naive(before[row].tolist(), sampling, prompt, answer))
    penalise(logits, penalised_rows)
    assert torch.equal(logits[-1], before[-1]), "a row without penalties is not touched"
    torch.testing.assert_close(logits[:-1], torch.tensor(expected))
    for row, pair in enumerate(penalised_rows):
        alone = before[row : row + 1].clone()
        penalise(alone, [(0, pair[1])])
        assert torch.equal(alone[0], logits[row])
