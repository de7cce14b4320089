"""`ray_prefix`: the rule of Ray Serve LLM's PrefixCacheAffinityRouter, over our view.

1. If the longest queue exceeds the shortest by more than a threshold: power of two by queue. Ray's default is infinite: never.
2. Else, if some replica matches at least a tenth of the prompt: those that match most of it.
3. Else: those with the smallest tree.

Of several, the shortest queue. A queue is the requests at a replica, running and waiting. All others follow, by queue.

An approximation. Ray keeps a tree of the prompt texts it has sent to each replica. Here what the directory says is cached
stands for a match, and what the pool has cached (`held_tokens`) for the size of a tree. So this one is better informed than
Ray's: it sees what was evicted, answers, token ids and other routers' requests. Ray compares characters, we tokens; it names the
smallest tree of all replicas, we of the candidates.
"""

from __future__ import annotations

import math
import random
from typing import Final

import numpy as np

from router.policies.scored import Policy, Scored, always
from router.route_config import RouteConfig
from router.view import FloatColumn, RouteRequest, View

MATCH_RATE: Final = 0.1
IMBALANCED_REQUESTS: Final = math.inf


def ray_prefix_rule(imbalanced_requests: float = IMBALANCED_REQUESTS, match_rate: float = MATCH_RATE) -> Policy:
    """Returns the policy with these thresholds: a difference of queues in requests, a share of the prompt."""

    def ray_prefix(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
        queue: FloatColumn = (view.running + view.waiting).astype(np.float64)
        longest = float(queue.max())
        terms = {"queue_requests": queue}
        if longest - float(queue.min()) > imbalanced_requests:
            reason = "queues differ too much so the shorter of two drawn"
            chosen = np.zeros(len(view), np.bool_)
            chosen[rng.sample(range(len(view)), min(2, len(view)))] = True
        elif (matched := int(view.cached_tokens.max())) and matched >= match_rate * request.prompt_tokens:
            reason = "shortest queue of those that match most"
            chosen = view.cached_tokens == matched
        else:
            reason = "shortest queue of those with the smallest tree"
            chosen = view.held_tokens == view.held_tokens.min()
        return Scored(np.where(chosen, queue, queue + (longest + 1.0)), terms, always(reason), "requests")

    return ray_prefix


ray_prefix: Final = ray_prefix_rule()
