"""`lmetric`, the alternative rule of NVIDIA Dynamo's router: prompt tokens left to compute, times requests there.

    (queued prompt tokens + own prompt tokens - those cached) x (running decodes + 1), the least wins

Dynamo counts in blocks; tokens differ by a factor. It has no rates: a decode makes every token left to compute dearer.

Limits: a product is 0 wherever nothing is left to compute, however many decodes run; such candidates are equal, by chance.
"""

from __future__ import annotations

import random

import numpy as np

from router.policies.scored import Scored, always
from router.route_config import RouteConfig
from router.view import FloatColumn, RouteRequest, View


def lmetric(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    """See above."""
    prefill_tokens: FloatColumn = np.maximum(
        view.queued_tokens + (request.prompt_tokens - view.cached_tokens), 0
    ).astype(np.float64)
    requests = view.running.astype(np.float64) + 1.0
    terms = {"prefill_tokens": prefill_tokens, "requests": requests}
    reason = always("least prompt tokens to compute times requests there")
    return Scored(prefill_tokens * requests, terms, reason, "tokens x requests")
