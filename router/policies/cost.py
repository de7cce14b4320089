"""`cost`, the default: the least of expected time to first token, and what the request costs those after it, in seconds.

    queue_s      prompt tokens queued at the replica / its prefill rate
    prefill_s    own prompt tokens not cached there / its prefill rate
    decode_s     running decodes x what each adds
    recompute_s  prefill_s x `recompute_weight` x (1 + requests that wait, on average of the replicas), the factor of prefill_s
                 at most `recompute_limit`
    displaced_s  tokens beyond the pool's free room x share that is asked for again / prefill rate x `displaced_weight`
    balance_s    tokens the pool has cached beyond the emptiest / prefill rate x `balance_weight`

The score is their sum. So affinity and load are weighed in seconds and nothing switches at a threshold: a hot replica loses a
request as soon as its queue costs more than computing the prefix elsewhere, and the prefix then has a second holder.

`recompute_s` is there because whoever waits behind the request waits for what is computed twice as well: nobody while the
replicas are idle, many when they are not. And a prefix that is being computed would not hold its siblings otherwise: waiting for
it takes as long as computing it again. `balance_s` is small: it sends what is new to pools that have less, until all are full.
`displaced_s` is what the pool
loses: a full pool gives up as many cached tokens as the request brings new ones, and those that are asked for again are computed
again.

Candidates within `tie_s` of the best are equal. Among them comes first the one that a hash of the request's session prefers, so
that a conversation stays where it began while that costs nothing; without a session, chance.

Limits: time spent waiting for decodes is linear in their number, and a request is taken to generate all the tokens it may.
"""

from __future__ import annotations

import random

import numpy as np

from router.decision import Outcome
from router.policies.cost_terms import TERMS, fill
from router.policies.rates import settled
from router.policies.rendezvous import preferred
from router.policies.scored import Scored
from router.route_config import RouteConfig
from router.view import FloatColumn, RouteRequest, View


def cost(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    """See above. Terms in seconds, and what they were made from: tokens that would be displaced, rates assumed."""
    rates, each_s = settled(view, config)
    share = view.reuse_share if view.reuse_share == view.reuse_share else config.reuse_share
    found = fill(
        view.cached_tokens,
        view.queued_tokens,
        view.running,
        view.waiting,
        view.free_tokens,
        view.held_tokens,
        rates,
        each_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        recompute_weight=config.recompute_weight,
        recompute_limit=config.recompute_limit,
        displaced_weight=share * config.displaced_weight,
        balance_weight=config.balance_weight,
    )
    score: FloatColumn = found[0]
    first = -1
    if request.session:
        first = preferred(request.session, view.replica_ids, score <= score.min() + config.tie_s)
    terms: dict[str, FloatColumn] = dict(zip(TERMS, found[1:], strict=True))
    terms["rate_tokens_per_s"] = rates

    def reason(chosen: int, outcome: Outcome) -> str:
        if outcome == "load_override":
            holder = int(np.where(view.cached_tokens == view.cached_tokens.max(), score, np.inf).argmin())
            if score[holder] <= score.min() + config.tie_s:
                return "no slower than its holders"

            def dearer(*names: str) -> float:
                return sum(float(terms[name][holder] - terms[name][chosen]) for name in names)

            wait, room = dearer("queue_s", "decode_s"), dearer("displaced_s", "balance_s")
            rate = dearer("prefill_s", "recompute_s")
            if room > max(wait, rate):
                return "its holders have less room for it"
            if rate > wait:
                return "its holders are slower than computing it again costs"
            return "its holders are busier than computing it again costs"
        among = " and its session's place among equals" if chosen == first else ""
        return ("nothing cached and least expected wait" if outcome == "no_prefix" else "longest cached prefix") + among

    return Scored(score, terms, reason, "s", config.tie_s, first)
