"""What is refused before it is queued, with the field at fault. The engine's own tests cover that nobody is harmed."""

from __future__ import annotations

from typing import Any

import pytest

from actors.errors import RequestRefused
from actors.request import GenerateRequest, Sampling
from actors.request_limits import RequestLimits

LIMITS = RequestLimits(vocab_size=100, eos=frozenset({99}), context_tokens=50, block_tokens=4, capacity_blocks=10)
NAN, INF = float("nan"), float("inf")


def request(prompt: tuple[int, ...] = (1, 2), max_tokens: int = 4, **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", prompt, Sampling(max_tokens, **sampling))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, (bad,)) for field in ("stop_token_ids", "allowed_token_ids") for bad in (-1, 100, 2**40)),
        *(("logit_bias", ((bad, 1.0),)) for bad in (-1, 100, 191_222)),
        *(("logit_bias", ((3, bad),)) for bad in (NAN, INF, -INF)),
        *((field, bad) for field in ("presence_penalty", "frequency_penalty") for bad in (NAN, INF, -INF)),
        *(("repetition_penalty", bad) for bad in (NAN, INF, 0.0, -1.0)),
        *(("logprobs", bad) for bad in (-1, 101)),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as refused:
        LIMITS.check(request(**{field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("made", "param"),
    [
        (request(()), "prompt"),
        (request((100,)), "prompt"),
        (request((1,) * 50), "prompt"),
        (request(max_tokens=0), "max_tokens"),
        (request(max_tokens=39), "max_tokens"),
    ],
)
def test_lengths_and_prompts_are_refused_by_name(made: GenerateRequest, param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        LIMITS.check(made)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "ends",
    [
        {"stop_token_ids": tuple(range(100))},
        {"stop_token_ids": tuple(range(99))},
        {"allowed_token_ids": (99,)},
        {"allowed_token_ids": (7, 99), "stop_token_ids": (7,)},
        {"allowed_token_ids": (99,), "stop_token_ids": (99,), "ignore_eos": True},
    ],
)
def test_an_answer_that_may_not_end_and_can_do_nothing_else_is_refused(ends: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        LIMITS.check(request(min_tokens=1, **ends))
    assert refused.value.param == "min_tokens"
    LIMITS.check(request(min_tokens=0, **ends))


def test_what_is_at_the_limits_is_served() -> None:
    LIMITS.check(request((0, 99), max_tokens=38))
    LIMITS.check(
        request(
            stop_token_ids=(0, 99),
            allowed_token_ids=(0, 99),
            logit_bias=((0, -100.0), (99, 100.0)),
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            repetition_penalty=0.01,
            logprobs=100,
        )
    )
    LIMITS.check(request(min_tokens=1, stop_token_ids=tuple(range(99)), ignore_eos=True))
    LIMITS.check(request(min_tokens=1, allowed_token_ids=(98, 99)))
