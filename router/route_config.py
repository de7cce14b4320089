"""How to route: the options of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["cost", "affinity", "least_load", "power_of_two", "round_robin", "lmetric", "chwbl", "ray_prefix"]


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """Which replica gets a request."""

    policy: PolicyName = "cost"
    """`cost` weighs cached prefixes against load, in seconds; the others are baselines."""
    prefill_tokens_per_s: float = 1000.0
    """Assumed while no replica has measured its own rate, and until first tokens have told."""
    rate_tolerance: float = 0.5
    """Rates that differ from their mean by less than this share are taken to be equal to it."""
    recompute_weight: float = 0.5
    """Weight of the time a request computes what it does not find cached, as time that those after it wait: for each request
    that waits at a replica, on average, and once more for whoever comes next."""
    recompute_limit: float = 6.0
    """The weight that this comes to at most."""
    decode_interference_s: float = 0.02
    """Seconds that one running decode adds to the time to first token of a new request, until first tokens have told."""
    reuse_share: float = 0.3
    """Share of cached tokens that are taken to be asked for again, until the share of prompts found cached has told."""
    displaced_weight: float = 1.0
    """Weight of the time it takes to compute again what a request displaces and somebody asks for."""
    balance_weight: float = 0.005
    """Weight of the time to compute what a pool has cached beyond the emptiest: evens out pools that are not full."""
    claim_tokens: int = 256
    """A prompt of which at least so many tokens are cached nowhere is computed once, whichever router gets it. 0: off."""
    tie_s: float = 0.001
    """Expected times closer than this are equal."""
    decision_log: str = ""
    """File to which every decision is written, with what was known and what came of it, for `kvatlas replay --decisions`: one
    JSON object a line, no prompts. It is kept below 64 MiB, three older ones beside it as FILE.1 to FILE.3. Empty: none."""
