"""Which replica gets a request: pure functions of (request, view, config, random source).

`cost`, the default, takes the least expected time to first token:

    (queued prompt tokens + own uncached prompt tokens) / prefill rate  +  running decodes x what each adds

so affinity and load are weighed in seconds and nothing switches at a threshold: a hot replica loses a request as soon
as its queue costs more than computing the prefix elsewhere, and the prefix then has a second holder. Candidates within
`tie_s` of the best are equal; among them the one that displaces least of what is cached wins, then chance. The other
policies are baselines.

No I/O, no clock, no state. Every policy ranks all candidates, so a caller whose first choice is full goes on with the
next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np

from router.decision import RouteDecision
from router.route_config import RouteConfig
from router.view import FloatColumn, RouteRequest, View


Terms = dict[str, FloatColumn]
Scored = tuple[FloatColumn, Terms, str]
Policy = Callable[[RouteRequest, View, RouteConfig, random.Random], Scored]


def decide(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> RouteDecision:
    """Rank the candidates of `view`. Raises ValueError for an unknown policy or an empty view. Draws from `rng` to break ties."""
    if not len(view):
        raise ValueError("no candidate to choose from")
    policy = POLICIES.get(config.policy)
    if policy is None:
        raise ValueError(f"unknown routing policy {config.policy!r}: choose one of {', '.join(sorted(POLICIES))}")
    score, terms, reason = policy(request, view, config, rng)
    chance = np.array([rng.random() for _ in range(len(view))])
    order = np.lexsort((chance, score))
    return RouteDecision(config.policy, reason, view, tuple(order.tolist()), score, terms)


def _cost(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    rate = np.where(view.prefill_tokens_per_s > 0, view.prefill_tokens_per_s, config.prefill_tokens_per_s)
    uncached = np.maximum(request.prompt_tokens - view.cached_tokens, 0)
    terms: Terms = {
        "queue_s": view.queued_tokens / rate,
        "prefill_s": uncached / rate,
        "decode_s": view.running.astype(np.float64) * config.decode_interference_s,
        "displaced_tokens": np.maximum(uncached + request.output_tokens - view.free_tokens, 0).astype(np.float64),
    }
    expected = terms["queue_s"] + terms["prefill_s"] + terms["decode_s"]
    tied = expected <= expected.min() + config.tie_s
    # Among equals the least displacement decides: pull them to the best time, then apart by less than a tie.
    share = terms["displaced_tokens"] / max(1.0, float(terms["displaced_tokens"].max()))
    score = np.where(tied, expected.min() + share * config.tie_s / 2, expected)
    best = int(np.argmin(score))
    cached = view.cached_tokens
    if not cached.any():
        reason = "nothing cached, least expected wait"
    elif cached[best] == cached.max():
        reason = "longest cached prefix"
    else:
        reason = "its holders are busier than computing it again costs"
    return score, terms, reason


def _load(view: View) -> FloatColumn:
    """Outstanding work in tokens, a running decode counting as one."""
    return (view.queued_tokens + view.running).astype(np.float64)


def _least_load(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    return _load(view), {}, "least load"


def _affinity(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    load = _load(view)
    # Cached tokens decide; load, squeezed below one token, only among equals.
    return (
        load / (load.max() + 1.0) - view.cached_tokens,
        {"load_tokens": load},
        "longest cached prefix, whatever the load",
    )


def _round_robin(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    by_name = np.argsort(np.argsort(np.array(view.replica_ids)))
    return ((by_name - request.turn) % len(view)).astype(np.float64), {}, "its turn"


def _power_of_two(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    load = _load(view)
    drawn = rng.sample(range(len(view)), min(2, len(view)))
    score = load + load.max() + 1.0
    score[drawn] = load[drawn]
    return score, {"load_tokens": load}, "less loaded of two drawn"


POLICIES: Mapping[str, Policy] = {
    "affinity": _affinity,
    "cost": _cost,
    "least_load": _least_load,
    "power_of_two": _power_of_two,
    "round_robin": _round_robin,
}
