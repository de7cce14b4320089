"""Which replica gets a request: pure functions of (request, view, config, random source).

`cost`, the default, takes the least of expected time to first token, and what the request costs those after it:

    (queued prompt tokens + own uncached prompt tokens) / prefill rate  +  running decodes x what each adds
        +  own uncached prompt tokens / prefill rate  x  `recompute_weight`

so affinity and load are weighed in seconds and nothing switches at a threshold: a hot replica loses a request as soon
as its queue costs more than computing the prefix elsewhere, and the prefix then has a second holder. The last term is there
because whoever comes next waits as well for what is computed twice, and because a prefix that is being computed would not
hold its siblings: waiting for it takes as long as computing it again. Candidates within `tie_s` of the best are equal; among
them the one that displaces least of what is cached wins, then chance.

Rates are measured by the replicas and vary with what they happened to compute. Were they taken at their word, the luckiest of
equal replicas would get every new prefix. So a rate counts only by what it differs from the mean beyond `rate_tolerance`; one
that has not been measured is the mean.

The other policies are baselines.

No I/O, no clock, no state. Every policy ranks all candidates, so a caller whose first choice is full goes on with the
next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np

from router.decision import RouteDecision, outcome_of
from router.route_config import RouteConfig
from router.view import FloatColumn, RouteRequest, View

Terms = dict[str, FloatColumn]
Reason = Callable[[int], str]
"""Says why the candidate with this index was chosen: chance may have decided among equals."""
Scored = tuple[FloatColumn, Terms, Reason]
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
    order = tuple(np.lexsort((chance, score)).tolist())
    outcome = outcome_of(view.cached_tokens, order[0])
    return RouteDecision(config.policy, outcome, reason(order[0]), view, order, score, terms)


def _cost(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    rate = _rates(view, config)
    uncached = np.maximum(request.prompt_tokens - view.cached_tokens, 0)
    terms: Terms = {
        "queue_s": view.queued_tokens / rate,
        "prefill_s": uncached / rate,
        "decode_s": view.running.astype(np.float64) * config.decode_interference_s,
        "recompute_s": uncached / rate * config.recompute_weight,
        "displaced_tokens": np.maximum(uncached + request.output_tokens - view.free_tokens, 0).astype(np.float64),
    }
    expected = terms["queue_s"] + terms["prefill_s"] + terms["decode_s"] + terms["recompute_s"]
    tied = expected <= expected.min() + config.tie_s
    # Among equals the least displacement decides: pull them to the best time, then apart by less than a tie.
    share = terms["displaced_tokens"] / max(1.0, float(terms["displaced_tokens"].max()))
    score = np.where(tied, expected.min() + share * config.tie_s / 2, expected)

    def reason(chosen: int) -> str:
        outcome = outcome_of(view.cached_tokens, chosen)
        if outcome == "no_prefix":
            return "nothing cached and least expected wait"
        if outcome == "prefix_hit":
            return "longest cached prefix"
        holders = view.cached_tokens == view.cached_tokens.max()
        if tied[holders].any():
            return "no slower than its holders"
        return "its holders are busier than computing it again costs"

    return score, terms, reason


def _always(text: str) -> Reason:
    return lambda chosen: text


def _rates(view: View, config: RouteConfig) -> FloatColumn:
    """Prompt tokens a second of each candidate, as far as it can be told from the others'."""
    measured = view.prefill_tokens_per_s
    known = measured > 0
    if not known.any():
        return np.full(len(view), config.prefill_tokens_per_s)
    logs = np.log(np.where(known, measured, 1.0))
    mean = logs[known].mean()
    drift = np.where(known, logs - mean, 0.0)
    beyond = np.sign(drift) * np.maximum(np.abs(drift) - np.log1p(config.rate_tolerance), 0.0)
    rates: FloatColumn = np.exp(mean + beyond)
    return rates


def _load(view: View) -> FloatColumn:
    """Outstanding work in tokens, a running decode counting as one."""
    return (view.queued_tokens + view.running).astype(np.float64)


def _least_load(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    return _load(view), {}, _always("least load")


def _affinity(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    load = _load(view)
    # Cached tokens decide; load, squeezed below one token, only among equals.
    return (
        load / (load.max() + 1.0) - view.cached_tokens,
        {"load_tokens": load},
        _always("longest cached prefix whatever the load"),
    )


def _round_robin(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    by_name = np.argsort(np.argsort(np.array(view.replica_ids)))
    return ((by_name - request.turn) % len(view)).astype(np.float64), {}, _always("its turn")


def _power_of_two(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    load = _load(view)
    drawn = rng.sample(range(len(view)), min(2, len(view)))
    score = load + load.max() + 1.0
    score[drawn] = load[drawn]
    return score, {"load_tokens": load}, _always("less loaded of two drawn")


POLICIES: Mapping[str, Policy] = {
    "affinity": _affinity,
    "cost": _cost,
    "least_load": _least_load,
    "power_of_two": _power_of_two,
    "round_robin": _round_robin,
}
