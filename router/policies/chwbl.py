"""`chwbl`: consistent hashing with bounded loads, as KubeAI routes by prefix.

Every replica has 256 points on a ring, the beginning of the prompt has one. The first replica clockwise from there whose load is
at most 1.25 x (all requests in flight + 1) / replicas gets the request. It needs no picture of the caches: equal beginnings
meet at the same replica as long as it is not overloaded.

Here: load is requests that run or wait; the beginning of a prompt is its first block, where KubeAI takes 100 characters. A
prompt shorter than one block has no beginning to hash and gets a point by chance.

Limits: a hash knows nothing of how far two prompts agree beyond their beginning.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

import numpy as np

from router.decision import Outcome
from router.policies.rendezvous import Hashes, hash_of, mixed, replica_hashes
from router.policies.scored import Scored
from router.route_config import RouteConfig
from router.view import FloatColumn, RouteRequest, View

POINTS: Final = 256
LOAD_FACTOR: Final = 1.25
_LISTS: Final = 8
_RING: Final = 2.0**64


def chwbl(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    """See above. `ring_distance`: clockwise from the prompt to the replica's next point, as a share of the ring."""
    load: FloatColumn = (view.running + view.waiting).astype(np.float64)
    most = LOAD_FACTOR * (float(load.sum()) + 1.0) / len(view)
    place = hash_of(request.prefix) if request.prefix else rng.getrandbits(64)
    # Unsigned subtraction wraps around as the ring does.
    ahead = _points(tuple(view.replica_ids)) - np.uint64(place)
    distance: FloatColumn = ahead.min(axis=1) / _RING
    overloaded = load > most
    score = distance + 2.0 * overloaded
    terms = {"load_requests": load, "ring_distance": distance}
    nearest = int(distance.argmin())

    def reason(chosen: int, outcome: Outcome) -> str:
        return "next on the ring" if chosen == nearest else "next on the ring that is not overloaded"

    return Scored(score, terms, reason, "rings")


@lru_cache(maxsize=_LISTS)
def _points(replica_ids: tuple[str, ...]) -> Hashes:
    """Returns the points of each candidate, one row each; the array must not be changed."""
    numbers = mixed(np.arange(1, POINTS + 1, dtype=np.uint64))
    points = mixed(replica_hashes(replica_ids)[:, None] ^ numbers[None, :])
    points.setflags(write=False)
    return points
