"""The ingress deployment: the HTTP app of `cluster.api`, built inside the Serve replica that runs it.

It imports no torch: a tokenizer needs none, and the import would cost seconds and hundreds of megabytes per ingress replica.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.api.key_list import ApiKey, parse_keys
from cluster.config import HttpConfig
from cluster.mirror_picture import MirrorPicture
from cluster.process_memory import HeapTrim, forget_start
from cluster.ray_client import replica_statuses
from cluster.routing import Routing, RoutingSettings
from cluster.text_codec import TextCodec

if TYPE_CHECKING:
    from cluster.api.keys import KeyRing
    from cluster.api.settings import ApiSettings


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the ingress is told by the app builder. `model_dir` holds the tokenizer.

    API keys travel as digests only: `http` is without keys.
    """

    model_name: str
    model_dir: str
    max_body_bytes: int
    admin_key: str = field(default="", repr=False)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    http: HttpConfig = field(default_factory=HttpConfig)
    api_keys: tuple[ApiKey, ...] = ()

    @staticmethod
    def of(http: HttpConfig, model_name: str, model_dir: str, routing: RoutingSettings) -> IngressSettings:
        """The settings that `http` comes to. Raises `KeyListError`."""
        keys = parse_keys(http.api_keys) if http.api_keys else ()
        nowhere = HttpConfig()  # where Serve listens is not the ingress's to know
        bare = replace(http, api_keys="", admin_key="", host=nowhere.host, port=nowhere.port)
        return IngressSettings(model_name, model_dir, http.max_body_bytes, http.admin_key, routing, bare, keys)


@serve.ingress()
class Ingress:
    """Validates, applies the chat template, tokenizes, and hands requests to the engine deployment."""

    def __init__(self, settings: IngressSettings, engine: DeploymentHandle[Any]) -> None:
        self._settings = settings
        self._engine = engine
        self._trim = HeapTrim()
        engine._init()  # the router of the handle now, not in the first request

    async def __serve_build_asgi_app__(self) -> Any:
        """The ASGI app; called once by Serve, after the constructor.

        Waits for the first engine replica, because the context length it can really serve depends on its pool. Until then
        Serve does not call this ingress ready, and no request is lost.
        """
        from cluster.api.app import build_app

        settings = self._settings
        keys = _keys(settings)  # before the long wait: a list that cannot be read ends the start
        codec = await asyncio.to_thread(_codec, Path(settings.model_dir))
        while not (statuses := await replica_statuses(self._engine)):  # noqa: ASYNC110 - another process, no event
            await asyncio.sleep(0.05)
        self._routing = Routing(self._engine, settings.model_name, settings.routing, statuses[0])
        await self._routing.until_whole([status.replica_id for status in statuses])
        app = build_app(
            _api_settings(settings, min(status.max_model_len for status in statuses)),
            self._routing.client,
            codec,
            keys=keys,
        )
        forget_start()
        return app

    async def mirror_picture(self) -> MirrorPicture:
        """What this router's mirror believes; asked by the one that compares all of them."""
        return await self._routing.client.mirror_picture()

    def __del__(self) -> None:
        """Serve calls this when the requests in progress are done: the other routers hear at once that this one is gone."""
        for name in ("_routing", "_trim"):  # the constructor may have failed, and the app may never have been built
            part = getattr(self, name, None)
            if part is not None:
                part.close()


def _api_settings(settings: IngressSettings, max_model_len: int) -> ApiSettings:
    """What the HTTP edge is told, of a server whose context is `max_model_len` tokens."""
    from cluster.api.admission import AdmissionLimits
    from cluster.api.settings import ApiSettings

    http = settings.http
    return ApiSettings(
        model_name=settings.model_name,
        max_model_len=max_model_len,
        admin_key=settings.admin_key,
        max_body_bytes=settings.max_body_bytes,
        created=int(time.time()),
        echo_request_id=False,
        admission=AdmissionLimits(http.queue_tokens, http.key_queue_tokens, http.inflight_tokens),
        request_timeout_s=http.request_timeout_s,
        keep_alive_s=http.keep_alive_s,
        allow_priority=http.allow_priority,
        debug_headers=not http.salt_per_key,
        cors_origins=tuple(http.cors_origins.split()),
    )


def _keys(settings: IngressSettings) -> KeyRing | None:
    """The keys that open the API; None where it is open to everybody. Raises `KeyListError`."""
    from cluster.api.keys import KeyRing

    http = settings.http
    if not settings.api_keys and not http.api_keys_file:
        return None
    file = Path(http.api_keys_file).expanduser() if http.api_keys_file else None
    secret = settings.routing.membership.secret if http.salt_per_key else b""
    return KeyRing(settings.api_keys, file, salt_secret=secret)


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
