"""The ingress deployment: the HTTP app of `cluster.api`, built inside the Serve replica that runs it.

It imports no torch: a tokenizer needs none, and the import would cost seconds and hundreds of megabytes per ingress replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.config import DirectoryConfig, Membership
from actors.status import ReplicaStatus
from cluster import membership
from cluster.prefix_keys import PrefixKeys
from cluster.ray_client import RayEngineClient, replica_statuses
from cluster.text_codec import TextCodec
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
class IngressSettings:
    """What the ingress is told by the app builder. `model_dir` holds the tokenizer."""

    model_name: str
    model_dir: str
    max_body_bytes: int
    admin_key: str = field(default="", repr=False)
    membership: Membership = field(default_factory=Membership)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    router: RouteConfig = field(default_factory=RouteConfig)


@serve.ingress()
class Ingress:
    """Validates, applies the chat template, tokenizes, and hands requests to the engine deployment."""

    def __init__(self, settings: IngressSettings, engine: DeploymentHandle[Any]) -> None:
        self._settings = settings
        self._engine = engine
        engine._init()  # the router of the handle now, not in the first request

    async def __serve_build_asgi_app__(self) -> Any:
        """The ASGI app; called once by Serve, after the constructor.

        Waits for the first engine replica, because the context length it can really serve depends on its pool. Until then
        Serve does not call this ingress ready, and no request is lost.
        """
        from cluster.api.app import build_app
        from cluster.api.settings import ApiSettings

        settings = self._settings
        codec = await asyncio.to_thread(_codec, Path(settings.model_dir))
        while not (statuses := await replica_statuses(self._engine)):  # noqa: ASYNC110 - another process, no event
            await asyncio.sleep(0.05)
        client = self._client(statuses[0])
        return build_app(
            ApiSettings(
                model_name=settings.model_name,
                max_model_len=min(status.max_model_len for status in statuses),
                admin_key=settings.admin_key,
                max_body_bytes=settings.max_body_bytes,
                created=int(time.time()),
                echo_request_id=False,
            ),
            client,
            codec,
        )

    def _client(self, status: ReplicaStatus) -> RayEngineClient:
        """The way to the replicas: keys as they compute them, and a router that follows the directory."""
        settings = self._settings
        open_reader = self._reader(status)
        mirror = Mirror() if open_reader is not None else None
        follower = None
        if open_reader is not None and mirror is not None:
            follower = FollowerThread(open_reader(), mirror, clock=time.monotonic, rng=random.SystemRandom())
        routes = RouteService(
            mirror,
            settings.router,
            block_tokens=status.block_tokens,
            clock=time.monotonic,
            rng=random.SystemRandom(),
            metrics=RayRouterMetrics(settings.model_name),
            fresh_s=settings.directory.lease_s,
            connected=lambda: follower is not None and follower.alive and follower.follower.connected,
        )
        registry.install(self._engine.deployment_name, routes)
        self._reporter = asyncio.create_task(_report_levels(routes))
        keys = PrefixKeys(settings.membership.secret, status)
        return RayEngineClient(self._engine, routes, keys, mirror, open_reader)

    def _reader(self, status: ReplicaStatus) -> Callable[[], DirectoryReader] | None:
        """What opens the directory for reading; None where there is none."""
        url = self._settings.directory.redis_url
        if not url:
            _log.warning(
                "no directory.redis_url: requests are routed by load only, not to where their prefix is cached"
            )
            return None
        from kvpool.directory.redis_backend import RedisReader

        cluster_id = membership.joined(self._settings.membership).cluster_id
        space = Space(cluster_id, status.fingerprint, status.block_tokens)
        return lambda: RedisReader(url, space)


async def _report_levels(routes: RouteService) -> None:
    while True:
        with contextlib.suppress(Exception):  # metrics are a courtesy
            routes.report_levels()
        await asyncio.sleep(_LEVELS_PERIOD_S)


def _codec(model_dir: Path) -> TextCodec:
    """The tokenizer of the model, bounded by the rows of its embedding."""
    with _torch_out_of_sight():
        from transformers import AutoConfig

    from cluster.text_codec import TransformersCodec

    config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
    return TransformersCodec(model_dir, config.get_text_config().vocab_size)


@contextmanager
def _torch_out_of_sight() -> Iterator[None]:
    """While the body imports transformers, `import torch` fails, and transformers notes for good that there is none.

    None in `sys.modules` is Python's own way to block an import; transformers has no switch for it (any more). Where torch
    is loaded already, nothing changes.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
