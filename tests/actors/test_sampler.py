"""Sampling is a function of logits and counter, and follows the filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.request import Sampling
from actors.sampler import Draw, sample, uniform
from actors.shaping import Shaper


def draw(position: int = 0, choice: int = 0, forbidden: tuple[int, ...] = (), **sampling: Any) -> Draw:
    return Draw(Sampling(max_tokens=1, **sampling), choice, position, forbidden)


def test_greedy_takes_the_lowest_id_of_equal_maxima() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]]), [draw(temperature=0.0)] * 2) == [1, 0]


def test_forbidden_ids_are_never_taken() -> None:
    assert sample(torch.tensor([[0.0, 9.0, 3.0]]), [draw(temperature=0.0, forbidden=(1,))]) == [2]


def only(*ids: int) -> Callable[[torch.Tensor], None]:
    """A mask that lets nothing but `ids` come."""

    def mask(row: torch.Tensor) -> None:
        kept = row[list(ids)]
        row.fill_(float("-inf"))
        row[list(ids)] = kept

    return mask


def masked(mask: Callable[[torch.Tensor], None], *, forbidden: tuple[int, ...] = (), **sampling: Any) -> Draw:
    return Draw(Sampling(1, **sampling), 0, 0, forbidden, None, mask)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_is_of_its_own_row(temperature: float) -> None:
    logits = torch.tensor([[0.0, 900.0, 3.0], [0.0, 900.0, 3.0]])
    assert sample(logits, [masked(only(0), temperature=temperature), draw(temperature=temperature)]) == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forbidden_comes_where_nothing_else_may(temperature: float) -> None:
    """As the end of an answer that is complete before its min_tokens."""
    logits = torch.tensor([[0.0, 9.0, 3.0]])
    assert sample(logits.clone(), [masked(only(0, 2), forbidden=(2,), temperature=temperature)]) == [0]
    assert sample(logits.clone(), [masked(only(2), forbidden=(1, 2), temperature=temperature)]) == [2]
    assert sample(logits.clone(), [masked(only(), forbidden=(1, 2), temperature=temperature)]) == [None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_a_mask_what_is_forbidden_never_comes(temperature: float) -> None:
    draws = [draw(temperature=temperature, forbidden=(0, 1)), draw(temperature=temperature)]
    assert sample(torch.tensor([[5.0, 5.0], [900.0, 5.0]]), draws) == [None, 0]


def test_nothing_left_is_none_and_harms_no_other_row() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, 3.0]])
    assert sample(logits, [masked(only()), draw(temperature=0.0)]) == [None, 2]


def test_requests_shape_before_masks_and_filters() -> None:
    """A bias raises nothing that is masked, and top-k counts what is left."""
    logits = torch.tensor([[5.0, 0.0, 0.0, 4.0]]).repeat(200, 1)
    shaper = Shaper.of(Sampling(1, logit_bias=((1, 8.0), (2, 6.0))), ())
    draws = [Draw(Sampling(1, top_k=2), 0, position, (), shaper, only(0, 2, 3)) for position in range(200)]
    assert set(sample(logits, draws)) == {0, 2}


def test_shaped_rows_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    wanted: list[dict[str, Any]] = [
        {"presence_penalty": 0.7, "repetition_penalty": 1.3},
        {"logit_bias": ((5, 2.5), (9, -3.0))},
        {"allowed_token_ids": tuple(range(40))},
        {},
        {"frequency_penalty": -0.3},
        {"min_p": 0.01, "frequency_penalty": 1.0, "logit_bias": ((5, 2.5),)},
    ]

    def draw_of(row: int) -> Draw:
        sampling = Sampling(1, seed=row, **wanted[row])
        shaper = Shaper.of(sampling, range(row, 30))
        if shaper is not None and shaper.seen is not None:
            shaper.seen.catch_up([*range(row, 30), *range(20, 90), *range(row)])
        return Draw(sampling, 0, row, (), shaper)

    together = sample(logits.clone(), [draw_of(row) for row in range(6)])
    assert together == [sample(logits[row : row + 1].clone(), [draw_of(row)])[0] for row in range(6)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_maximum_gives_none(bad: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 2.0, 1.0]])
    tokens = sample(logits, [draw(temperature=temperature), draw(temperature=0.0)])
    assert tokens == [None, 1]


def test_a_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 100)
    draws = [draw(position=p, seed=p % 3) for p in range(8)]
    together = sample(logits.clone(), draws)
    alone = [sample(logits[p : p + 1].clone(), [draws[p]])[0] for p in range(8)]
    assert together == alone


def test_seed_choice_and_position_each_matter() -> None:
    logits = torch.zeros(1, 50_000)
    first = sample(logits.clone(), [draw(seed=1)])
    assert first == sample(logits.clone(), [draw(seed=1)])
    others = [draw(seed=2), draw(seed=1, choice=1), draw(seed=1, position=1), draw(seed=-1)]
    assert len({first[0], *(sample(logits.clone(), [other])[0] for other in others)}) == 5


def test_frequencies_follow_the_probabilities() -> None:
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = wanted.log().repeat(4000, 1)
    counts = Counter(sample(logits, [draw(position=p, seed=7) for p in range(4000)]))
    for token, probability in enumerate(wanted.tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.79}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_p": 0.0001}, {0}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"top_k": 3, "min_p": 0.5}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
)
def test_filters_leave_what_they_should(filters: dict[str, Any], left: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(600, 1)
    assert set(sample(logits, [draw(position=p, **filters) for p in range(600)])) == left


@given(st.floats(0.001, 1e-3 * 1.5), st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=9, unique=True))
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float, values: list[float]) -> None:
    logits = torch.tensor([values])
    if logits.unique().numel() == len(values) and float(logits.topk(2).values.diff().abs()) > 1:
        assert sample(logits.clone(), [draw(temperature=temperature)]) == [int(logits.argmax())]


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32), st.integers(0, 2**40))
def test_uniform_is_in_the_unit_interval(seed: int, choice: int, position: int) -> None:
    assert 0.0 <= uniform(seed, choice, position) < 1.0
