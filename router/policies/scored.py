"""What a policy returns.

A policy is a pure function: no I/O, no clock, no state, nothing of the view changed. It scores all candidates at once, in a few
operations on columns; `router.policy.decide` ranks them, equals by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.decision import Outcome
from router.route_config import RouteConfig
from router.view import FloatColumn, RouteRequest, View

Terms = Mapping[str, FloatColumn]
Reason = Callable[[int, Outcome], str]
"""Says why the candidate with this index was chosen, and to what outcome: chance may have decided among equals."""


class Scored(NamedTuple):
    """A score for each candidate, lower is better, finite; the terms it was made from, and the reason in words.

    Candidates whose score is above the best by at most `tie` are equal to it. `first`: index of the one to take among those, -1
    for chance; it must be one of them. `unit`: of the score.
    """

    score: FloatColumn
    terms: Terms
    reason: Reason
    unit: str
    tie: float = 0.0
    first: int = -1


Policy = Callable[[RouteRequest, View, RouteConfig, random.Random], Scored]


def always(text: str) -> Reason:
    """Returns a reason that is the same whoever was chosen."""
    return lambda chosen, outcome: text
