"""Biases, penalties and the only tokens allowed: in this order, each in its own row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from actors.request import Sampling
from actors.shaping import Shaper, shape


def shaper(prompt: tuple[int, ...] = (), **sampling: Any) -> Shaper:
    made = Shaper.of(Sampling(1, **sampling), prompt)
    assert made is not None
    return made


def shaped(logits: list[float], one: Shaper) -> list[float]:
    rows = torch.tensor([[7.0] * len(logits), logits])
    shape(rows, [(1, one)])
    assert rows[0].tolist() == [7.0] * len(logits)
    return rows[1].tolist()


def test_a_plain_request_has_no_shaper() -> None:
    assert Shaper.of(Sampling(1, temperature=0.3, top_k=4, min_tokens=3, logprobs=5), (1, 2)) is None


def test_biases_are_added() -> None:
    assert shaped([0.0, 1.0, 2.0], shaper(logit_bias=((2, -100.0), (0, 0.5)))) == [0.5, 1.0, -98.0]


def test_biases_of_one_id_add_up() -> None:
    assert shaped([0.0, 1.0], shaper(logit_bias=((1, 2.0), (1, 3.0)))) == [0.0, 6.0]


def test_all_but_the_allowed_are_ruled_out() -> None:
    assert shaped([0.0, 1.0, 2.0], shaper(allowed_token_ids=(1, 0, 1))) == [0.0, 1.0, -math.inf]


def test_biases_come_before_penalties() -> None:
    one = shaper((0,), logit_bias=((0, 4.0),), repetition_penalty=2.0)
    assert shaped([-2.0, 1.0], one) == [1.0, 1.0]


def test_no_bias_brings_back_what_is_not_allowed() -> None:
    assert shaped([0.0, 1.0], shaper(logit_bias=((1, 100.0),), allowed_token_ids=(0,))) == [0.0, -math.inf]


@pytest.mark.parametrize("sampling", [{"logit_bias": ((0, 1.5),)}, {"allowed_token_ids": (0,)}])
def test_what_is_made_once_serves_every_step(sampling: dict[str, Any]) -> None:
    one = shaper(**sampling)
    assert shaped([0.0, 1.0], one) == shaped([0.0, 1.0], one)
