"""Connects an ingress to the directory: a mirror that follows it, and a router, installed where Serve's adapter finds it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.config import DirectoryConfig, Membership
from actors.status import ReplicaStatus
from cluster import membership
from cluster.prefix_keys import PrefixKeys
from cluster.ray_client import RayEngineClient
from kvpool.directory import DirectoryReader, Space
from router import registry
from router.follower import FollowerThread
from router.metrics import RayRouterMetrics
from router.mirror import Mirror
from router.route_config import RouteConfig
from router.service import RouteService

_log = logging.getLogger(__name__)
_LEVELS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """What the ingress is told about the cluster, its directory, and how to route."""

    membership: Membership = field(default_factory=Membership)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    policy: RouteConfig = field(default_factory=RouteConfig)


class Routing:
    """The way to the replicas of `engine`, one of which reports `status`. Build it where an event loop runs.

    Starts the follower's thread and a task that reports levels; `close` ends both.
    """

    def __init__(
        self, engine: DeploymentHandle[Any], model_name: str, settings: RoutingSettings, status: ReplicaStatus
    ) -> None:
        open_reader = _reader(settings, status)
        mirror = follower = None
        if open_reader is not None:
            mirror = Mirror(default_lease_s=settings.directory.lease_s)
            follower = FollowerThread(open_reader(), mirror, clock=time.monotonic, rng=random.SystemRandom())
        routes = RouteService(
            mirror,
            settings.policy,
            block_tokens=status.block_tokens,
            clock=time.monotonic,
            rng=random.SystemRandom(),
            metrics=RayRouterMetrics(model_name),
            fresh_s=settings.directory.lease_s,
            connected=lambda: follower is not None and follower.alive and follower.follower.connected,
            problem=lambda: follower.follower.problem if follower is not None else "",
        )
        keys = PrefixKeys(settings.membership.secret, status)
        self.client = RayEngineClient(engine, routes, keys, mirror, open_reader)
        self._deployment = engine.deployment_name
        self._follower = follower
        self._reporter = asyncio.create_task(_report_levels(routes))
        registry.install(self._deployment, routes)

    def close(self) -> None:
        """Stop following and reporting; Serve's router finds nobody to ask any more. Idempotent."""
        registry.remove(self._deployment)
        self._reporter.cancel()
        if self._follower is not None:
            self._follower.close()


def _reader(settings: RoutingSettings, status: ReplicaStatus) -> Callable[[], DirectoryReader] | None:
    """What opens the directory for reading; None where there is none."""
    url = settings.directory.redis_url
    if not url:
        _log.warning("no directory.redis_url: requests are routed by load only, not to where their prefix is cached")
        return None
    from kvpool.directory.redis_backend import RedisReader

    cluster_id = membership.joined(settings.membership).cluster_id
    space = Space(cluster_id, status.fingerprint, status.block_tokens)
    return lambda: RedisReader(url, space)


async def _report_levels(routes: RouteService) -> None:
    while True:
        with contextlib.suppress(Exception):  # metrics are a courtesy
            routes.report_levels()
        await asyncio.sleep(_LEVELS_PERIOD_S)
