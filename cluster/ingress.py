"""The ingress deployment: the HTTP app of `cluster.api`, built inside the Serve replica that runs it.

It imports no torch: a tokenizer needs none, and the import would cost seconds and hundreds of megabytes per ingress replica.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.mirror_picture import MirrorPicture
from cluster.ray_client import replica_statuses
from cluster.routing import Routing, RoutingSettings
from cluster.text_codec import TextCodec


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the ingress is told by the app builder. `model_dir` holds the tokenizer."""

    model_name: str
    model_dir: str
    max_body_bytes: int
    admin_key: str = field(default="", repr=False)
    routing: RoutingSettings = field(default_factory=RoutingSettings)


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
        self._routing = Routing(self._engine, settings.model_name, settings.routing, statuses[0])
        await self._routing.until_whole([status.replica_id for status in statuses])
        return build_app(
            ApiSettings(
                model_name=settings.model_name,
                max_model_len=min(status.max_model_len for status in statuses),
                admin_key=settings.admin_key,
                max_body_bytes=settings.max_body_bytes,
                created=int(time.time()),
                echo_request_id=False,
            ),
            self._routing.client,
            codec,
        )

    async def mirror_picture(self) -> MirrorPicture:
        """What this router's mirror believes; asked by the one that compares all of them."""
        return await self._routing.client.mirror_picture()

    def __del__(self) -> None:
        """Serve calls this when the requests in progress are done: the other routers hear at once that this one is gone."""
        routing = getattr(self, "_routing", None)  # the app may never have been built
        if routing is not None:
            routing.close()


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
