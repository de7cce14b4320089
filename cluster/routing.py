"""Connects an ingress to the directory: a mirror that follows it, and a router, installed where Serve's adapter finds it.

With a directory the router shares its bookings with those of other ingresses, and cold prefixes are claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from ray.serve.handle import DeploymentHandle

from actors.config import DirectoryConfig, Membership
from actors.status import ReplicaStatus
from cluster import membership
from cluster.prefix_keys import PrefixKeys
from cluster.ray_client import RayEngineClient
from kvpool.directory import DirectoryReader, Space
from kvpool.directory.exchange import ClaimStore, Exchange
from router import registry
from router.claim_keeper import ClaimKeeper, KeeperThread
from router.claims import Claims
from router.decision_log import DecisionLog, place
from router.follower import FollowerThread
from router.logged_service import LoggedRouteService
from router.metrics import RayRouterMetrics
from router.mirror import Mirror
from router.outbox import Outbox
from router.policy import decide
from router.route_config import RouteConfig
from router.service import RouteService
from router.sharing import Sharing, new_origin
from router.view import RouteRequest, View

_log = logging.getLogger(__name__)
_LEVELS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """What the ingress is told about the cluster, its directory, and how to route."""

    membership: Membership = field(default_factory=Membership)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    policy: RouteConfig = field(default_factory=RouteConfig)


@dataclass(frozen=True, slots=True)
class _Ends:
    """What opens the parts of a directory that a router uses."""

    reader: Callable[[], DirectoryReader]
    exchange: Callable[[], Exchange]
    claims: Callable[[], ClaimStore]


class Routing:
    """The way to the replicas of `engine`, one of which reports `status`. Build it where an event loop runs.

    Starts the threads that follow the directory, share bookings and keep claims, and a task that reports levels; `close`
    ends them all.
    """

    def __init__(
        self, engine: DeploymentHandle[Any], model_name: str, settings: RoutingSettings, status: ReplicaStatus
    ) -> None:
        with contextlib.ExitStack() as parts:
            self._connect(engine, model_name, settings, status, parts)
            self._parts = parts.pop_all()  # nothing failed: they live until `close`

    async def until_whole(self, replica_ids: Sequence[str]) -> None:
        """Waits, for a lease at most, until the mirror knows the pools of these replicas: the first decisions would be blind."""
        if self._follower is not None:
            await asyncio.to_thread(self._follower.wait_until_whole, replica_ids, self._lease_s)

    def close(self) -> None:
        """Stop following, sharing and reporting; Serve's router finds nobody to ask any more. Idempotent."""
        self._parts.close()

    def _connect(
        self,
        engine: DeploymentHandle[Any],
        model_name: str,
        settings: RoutingSettings,
        status: ReplicaStatus,
        parts: contextlib.ExitStack,
    ) -> None:
        """Builds everything; leaves with `parts` what ends it, in the order in which it began."""
        clock, rng = time.monotonic, random.SystemRandom()
        lease_s = settings.directory.lease_s
        ends = _ends(settings, status)
        metrics = RayRouterMetrics(model_name)
        outbox = Outbox(new_origin(rng), clock)
        mirror = follower = sharing = claims = None
        if ends is not None:
            mirror = Mirror(default_lease_s=lease_s)
            follower = FollowerThread(ends.reader(), mirror, clock=clock, rng=rng)
            parts.callback(follower.close)
        self._follower, self._lease_s = follower, lease_s
        build: Callable[..., RouteService] = RouteService
        if settings.policy.decision_log:
            log = DecisionLog(place(settings.policy.decision_log))
            parts.callback(log.close)
            build = partial(LoggedRouteService, log=log, unix_clock=time.time)
        routes = build(
            mirror,
            settings.policy,
            block_tokens=status.block_tokens,
            clock=clock,
            rng=rng,
            metrics=metrics,
            fresh_s=lease_s,
            connected=lambda: follower is not None and follower.alive and follower.follower.connected,
            problem=lambda: follower.follower.problem if follower is not None else "",
            announce=outbox.announce if ends is not None else None,
        )
        _decide_once(settings.policy)
        if ends is not None:
            sharing = Sharing(ends.exchange, outbox, routes, clock=clock, rng=rng, lease_s=lease_s)
            parts.callback(sharing.close)
            store = ends.claims()
            keeper = ClaimKeeper(store, clock)
            parts.callback(KeeperThread(keeper, store).close)
            claims = Claims(
                keeper,
                routes,
                clock=clock,
                origin=outbox.origin,
                block_tokens=status.block_tokens,
                least_tokens=settings.policy.claim_tokens,
                noted=metrics.claimed,
            )
        keys = PrefixKeys(settings.membership.secret, status)
        self.client = RayEngineClient(
            engine, routes, keys, mirror, ends.reader if ends is not None else None, claims, sharing
        )
        parts.callback(asyncio.create_task(_report_levels(routes, sharing, metrics)).cancel)
        registry.install(engine.deployment_name, routes)
        parts.callback(registry.remove, engine.deployment_name)


def _ends(settings: RoutingSettings, status: ReplicaStatus) -> _Ends | None:
    """What opens the directory; None where there is none."""
    url = settings.directory.redis_url
    if not url:
        _log.warning("no directory.redis_url: requests are routed by load only, not to where their prefix is cached")
        return None
    from kvpool.directory.redis_backend import RedisReader
    from kvpool.directory.redis_exchange import RedisClaimStore, RedisExchange

    cluster_id = membership.joined(settings.membership).cluster_id
    space = Space(cluster_id, status.fingerprint, status.block_tokens)
    return _Ends(
        lambda: RedisReader(url, space),
        lambda: RedisExchange(url, space, random.SystemRandom()),
        lambda: RedisClaimStore(url, space),
    )


def _decide_once(config: RouteConfig) -> None:
    """Makes a decision that nobody asked for: the first one in a process loads what others then have, some 10 ms."""
    nothing = np.zeros(1, np.int64)
    with contextlib.suppress(Exception):  # a request will say so
        decide(
            RouteRequest(1, 1), View(("",), nothing, nothing, nothing, nothing, np.zeros(1)), config, random.Random(0)
        )


async def _report_levels(routes: RouteService, sharing: Sharing | None, metrics: RayRouterMetrics) -> None:
    while True:
        with contextlib.suppress(Exception):  # metrics are a courtesy
            routes.report_levels()
            if sharing is not None:
                now = sharing.report()
                metrics.shared(now["routers"], now["bookings"], now["sent"], now["received"], now["dropped"])
        await asyncio.sleep(_LEVELS_PERIOD_S)
