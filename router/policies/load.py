"""Policies that do not look at prefixes, or at nothing else: `least_load`, `power_of_two`, `round_robin`, `affinity`.

They are baselines: what load alone reaches, and what prefixes alone reach.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

import numpy as np

from router.policies.scored import Scored, always
from router.route_config import RouteConfig
from router.view import FloatColumn, IntColumn, RouteRequest, View

_LISTS: Final = 16


def least_load(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    """The least outstanding work."""
    load = load_tokens(view)
    return Scored(load, {"load_tokens": load}, always("least load"), "tokens")


def power_of_two(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    """The less loaded of two candidates drawn; the others come after both, by load."""
    load = load_tokens(view)
    drawn = rng.sample(range(len(view)), min(2, len(view)))
    score = load + load.max() + 1.0
    score[drawn] = load[drawn]
    return Scored(score, {"load_tokens": load}, always("less loaded of two drawn"), "tokens")


def round_robin(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    """Each in turn, by name."""
    places = _places(tuple(view.replica_ids))
    return Scored(((places - request.turn) % len(view)).astype(np.float64), {}, always("its turn"), "turns")


def affinity(request: RouteRequest, view: View, config: RouteConfig, rng: random.Random) -> Scored:
    """The longest cached prefix whatever the load; load only among equals."""
    load = load_tokens(view)
    # Cached tokens decide; load, squeezed below one token, only among equals.
    score: FloatColumn = load / (load.max() + 1.0) - view.cached_tokens
    return Scored(score, {"load_tokens": load}, always("longest cached prefix whatever the load"), "tokens")


def load_tokens(view: View) -> FloatColumn:
    """Returns outstanding work in tokens, a running decode counting as one."""
    return (view.queued_tokens + view.running).astype(np.float64)


@lru_cache(maxsize=_LISTS)
def _places(replica_ids: tuple[str, ...]) -> IntColumn:
    """Returns the place of each candidate in the order of names; the array must not be changed."""
    places = np.empty(len(replica_ids), np.int64)
    places[sorted(range(len(replica_ids)), key=replica_ids.__getitem__)] = np.arange(len(replica_ids))
    places.setflags(write=False)
    return places
