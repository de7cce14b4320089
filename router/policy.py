"""Which replica gets a request: `decide`, a pure function of (request, view, config, random source).

A policy (`router/policies/`) scores all candidates; here they are ranked, equals by chance, so a caller whose first choice is
full goes on with the next. `cost` is the default and weighs prefixes against load in seconds; the other policies are
baselines.

No I/O, no clock, no state. A decision on 1,024 candidates is some twenty operations on columns, no loop over candidates.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from router.decision import RouteDecision, outcome_of
from router.policies.chwbl import chwbl
from router.policies.cost import cost
from router.policies.lmetric import lmetric
from router.policies.load import affinity, least_load, power_of_two, round_robin
from router.policies.ray_prefix import ray_prefix
from router.policies.scored import Policy
from router.ranking import ranked
from router.route_config import RouteConfig
from router.view import RouteRequest, View

POLICIES: Final[Mapping[str, Policy]] = {
    "affinity": affinity,
    "chwbl": chwbl,
    "cost": cost,
    "least_load": least_load,
    "lmetric": lmetric,
    "power_of_two": power_of_two,
    "ray_prefix": ray_prefix,
    "round_robin": round_robin,
}


def decide(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> RouteDecision:
    """Rank the candidates of `view`. Raises ValueError for an unknown policy or an empty view. Draws from `rng` to break ties."""
    n = len(view)
    if not n:
        raise ValueError("no candidate to choose from")
    policy = POLICIES.get(config.policy)
    if policy is None:
        raise ValueError(f"unknown routing policy {config.policy!r}: choose one of {', '.join(sorted(POLICIES))}")
    scored = policy(request, view, config, rng)
    order = tuple(ranked(scored.score, scored.tie, scored.first, rng))
    outcome = outcome_of(view.cached_tokens, order[0])
    reason = scored.reason(order[0], outcome)
    return RouteDecision(config.policy, outcome, reason, view, order, scored.score, scored.terms, scored.unit)
