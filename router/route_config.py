"""How to route: the options of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["cost", "affinity", "least_load", "power_of_two", "round_robin"]


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """Which replica gets a request."""

    policy: PolicyName = "cost"
    """`cost` weighs cached prefixes against load, in seconds; the others are baselines."""
    prefill_tokens_per_s: float = 1000.0
    """Assumed while no replica has measured its own rate."""
    rate_tolerance: float = 0.5
    """Measured rates that differ from their mean by less than this share are taken to be equal to it."""
    recompute_weight: float = 2.0
    """Weight of the time a request computes what it does not find cached, as time that those after it wait."""
    decode_interference_s: float = 0.02
    """Seconds that one running decode adds to the time to first token of a new request."""
    tie_s: float = 0.001
    """Expected times closer than this are equal."""
