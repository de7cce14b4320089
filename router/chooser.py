"""From what is known of the candidates to a decision.

By policy: each candidate's pool is found by the replica ids of its heartbeats. Its load is its own part of the pool's last
heartbeat plus the bookings that this heartbeat cannot contain; what it has cached of the prompt is the longer of what the
directory says of the pool and what prompts booked at the candidate itself promise. The policy ranks; candidates that no live pool
speaks for come last.

Replicas that share a pool have the same blocks cached, so among them load decides. A prompt on its way to one of them promises
nothing to the others: a replica waits for a block that it computes itself, but what another computes it has only once that is
sealed, and then the directory says so.

By load, the fallback: least booked work first, a request counting as one token; chance among equals.

Limits: what several replicas share counts as free for each of them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvpool.directory.messages import ReplicaLoad
from router.decision import RouteDecision
from router.mirror import Mirror, PoolView
from router.policy import decide
from router.route_config import RouteConfig
from router.view import RouteRequest, View

_log = logging.getLogger(__name__)


class Booked(NamedTuple):
    """What bookings add to a replica's own report: prompt tokens owed, requests, leading blocks of the prompt promised."""

    tokens: int
    requests: int
    promised_blocks: int


AskBookings = Callable[[Sequence[str], Sequence[float | None], Sequence[bytes]], list[Booked]]
"""(replicas, when the report of each arrived (None: no report), keys of the prompt) -> one `Booked` each."""


class Home(NamedTuple):
    """Where a replica lives: its pool, and what the pool's last heartbeat tells of the replica itself."""

    pool: PoolView
    load: ReplicaLoad


class Chooser:
    """See above. `mirror` None: there is no directory. Draws from `rng`."""

    def __init__(
        self, mirror: Mirror | None, config: RouteConfig, block_tokens: int, rng: random.Random, booked: AskBookings
    ) -> None:
        self._mirror = mirror
        self._config = config
        self._block_tokens = block_tokens
        self._rng = rng
        self._booked = booked

    def by_policy(
        self, request: RouteRequest, keys: Sequence[bytes], replica_ids: Sequence[str], now: float
    ) -> RouteDecision | None:
        """Returns the policy's decision; None when no candidate has a live pool. Raises what the policy raises."""
        homes = self._homes(now)
        heard = [replica_id for replica_id in replica_ids if replica_id in homes]
        if not heard:
            return None
        view = self._view(request, keys, heard, [homes[replica_id] for replica_id in heard], now)
        decision = decide(request, view, self._config, self._rng)
        if len(heard) == len(replica_ids):
            return decision
        return self._with_last(decision, [replica_id for replica_id in replica_ids if replica_id not in homes])

    def by_load(self, replica_ids: Sequence[str], reason: str) -> RouteDecision:
        """Returns the fallback decision. `reason` says why it is one."""
        booked = self._booked(replica_ids, [None] * len(replica_ids), ())
        load = [one.tokens + one.requests for one in booked]
        try:
            chance = [self._rng.random() for _ in load]
        except Exception:
            _log.debug("no random numbers: equals come in the order given", exc_info=True)
            chance = [0.0 for _ in load]
        zeros = np.zeros(len(load), np.int64)
        view = View(
            list(replica_ids),
            zeros,
            np.array([one.tokens for one in booked], np.int64),
            np.array([one.requests for one in booked], np.int64),
            zeros,
            np.zeros(len(load), np.float64),
        )
        order = tuple(sorted(range(len(load)), key=lambda index: (load[index], chance[index])))
        return RouteDecision("least_load", "fallback", reason, view, order, np.array(load, np.float64), {})

    def _homes(self, now: float) -> dict[str, Home]:
        """Returns the live pool of every replica; where two claim one, the one heard last."""
        homes: dict[str, Home] = {}
        if self._mirror is not None:
            for pool in self._mirror.pools(now):
                for load in pool.replicas:
                    known = homes.get(load.replica_id)
                    if known is None or pool.age_s < known.pool.age_s:
                        homes[load.replica_id] = Home(pool, load)
        return homes

    def _view(
        self, request: RouteRequest, keys: Sequence[bytes], replica_ids: list[str], homes: list[Home], now: float
    ) -> View:
        assert self._mirror is not None
        held = self._mirror.match(keys)
        booked = self._booked(replica_ids, [now - home.pool.load_age_s for home in homes], keys)
        # The last prompt token is computed in any case, because its logits are needed: no replica finds a whole prompt.
        most = max(0, request.prompt_tokens - 1)
        cached, queued, running = [], [], []
        for (pool, load), one in zip(homes, booked, strict=True):
            cached.append(min(most, self._block_tokens * max(held.get(pool.pool, 0), one.promised_blocks)))
            queued.append(load.queued_prefill_tokens + one.tokens)
            running.append(load.running + one.requests)
        return View(
            replica_ids,
            np.array(cached, np.int64),
            np.array(queued, np.int64),
            np.array(running, np.int64),
            np.array([home.pool.free_blocks * self._block_tokens for home in homes], np.int64),
            np.array([home.load.prefill_tokens_per_s for home in homes], np.float64),
        )

    def _with_last(self, decision: RouteDecision, replica_ids: list[str]) -> RouteDecision:
        """Returns the decision with these candidates, of which nothing is known but bookings, behind all others."""
        last = self.by_load(replica_ids, "")
        view, more = decision.view, last.view
        unknown = np.full(len(replica_ids), np.nan)
        joined = View(
            [*view.replica_ids, *more.replica_ids],
            np.concatenate([view.cached_tokens, more.cached_tokens]),
            np.concatenate([view.queued_tokens, more.queued_tokens]),
            np.concatenate([view.running, more.running]),
            np.concatenate([view.free_tokens, more.free_tokens]),
            np.concatenate([view.prefill_tokens_per_s, more.prefill_tokens_per_s]),
        )
        return replace(
            decision,
            view=joined,
            order=(*decision.order, *(len(view) + index for index in last.order)),
            score=np.concatenate([decision.score, unknown]),
            terms={name: np.concatenate([column, unknown]) for name, column in decision.terms.items()},
        )


def as_they_come(replica_ids: Sequence[str], reason: str) -> RouteDecision:
    """Returns a fallback decision that asks nobody: the candidates in the order given."""
    zeros, order = np.zeros(len(replica_ids), np.int64), tuple(range(len(replica_ids)))
    view = View(list(replica_ids), zeros, zeros, zeros, zeros, zeros.astype(np.float64))
    return RouteDecision("least_load", "fallback", reason, view, order, zeros.astype(np.float64), {})
