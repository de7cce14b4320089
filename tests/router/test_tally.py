"""Totals of a router, and what of a prediction came true."""

from __future__ import annotations

import pytest

from router.decision import OUTCOMES
from router.tally import Found, Tally


@pytest.mark.parametrize(
    ("predicted", "listed", "measured", "phantom", "promised", "unkept"),
    [
        (0, 0, 0, 0, 0, 0),
        (32, 32, 32, 0, 0, 0),
        (32, 32, 16, 16, 0, 0),
        (32, 32, 64, 0, 0, 0),
        (64, 32, 64, 0, 32, 0),
        (64, 32, 48, 0, 32, 16),
        (64, 32, 16, 16, 32, 32),
        (64, 0, 0, 0, 64, 64),
    ],
)
def test_what_is_missing_is_listed_or_promised(
    predicted: int, listed: int, measured: int, phantom: int, promised: int, unkept: int
) -> None:
    found = Found(100, predicted, listed, measured)
    assert (found.phantom_tokens, found.promised_tokens, found.unkept_tokens) == (phantom, promised, unkept)
    assert phantom + unkept == max(0, predicted - measured)


def test_totals_are_of_the_same_requests() -> None:
    tally = Tally()
    tally.look_up(Found(100, 64, 32, 16))
    tally.look_up(Found(50, 32, 32, 48))
    tally.outcomes["prefix_hit"] += 2
    assert tally.report() == {
        "decisions": dict.fromkeys(OUTCOMES, 0) | {"prefix_hit": 2},
        "queried_tokens": 150,
        "predicted_tokens": 96,
        "promised_tokens": 32,
        "measured_tokens": 64,
        "phantom_tokens": 16,
        "unkept_tokens": 32,
        "retries": 0,
    }
