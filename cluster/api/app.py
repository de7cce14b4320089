"""The HTTP application: routes, middleware, and the one place where they meet.

    RequestId -> Head -> Cors -> FailSafe -> Limits -> ApiKeys -> routes

Cors is there where origins are allowed, ApiKeys where there are keys. Whatever raises is inside FailSafe, and the pages that
Cors allows can read what FailSafe answers.

The application talks to replicas through an `EngineClient` and to text through a `TextCodec`, so it runs the same over Ray
Serve and over a scripted fake. All middleware is pure ASGI: wrappers that run the application in a task of their own hide
disconnects from it.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.admission import Admission
from cluster.api.chat import chat_router
from cluster.api.completions import completions_router
from cluster.api.cors import CorsMiddleware
from cluster.api.debug import debug_router
from cluster.api.edge import Edge
from cluster.api.errors import ApiError, shorten
from cluster.api.failsafe import FailSafeMiddleware
from cluster.api.grammar_check import GrammarCheck
from cluster.api.head import HeadMiddleware
from cluster.api.health import health_router, installed_version
from cluster.api.keys import ApiKeysMiddleware, KeyRing
from cluster.api.limits import LimitsMiddleware
from cluster.api.models import models_router
from cluster.api.openapi import install_openapi
from cluster.api.request_id import RequestIdMiddleware
from cluster.api.settings import ApiSettings
from cluster.api.tokenizing import tokenizing_router
from cluster.engine_client import EngineClient
from cluster.text_codec import TextCodec

__all__ = ["ApiSettings", "build_app"]


def _random_id() -> str:
    return uuid.uuid4().hex


def _random_seed() -> int:
    return secrets.randbits(64)


def build_app(
    settings: ApiSettings,
    client: EngineClient,
    codec: TextCodec,
    *,
    keys: KeyRing | None = None,
    new_id: Callable[[], str] = _random_id,
    clock: Callable[[], float] = time.time,
    draw_seed: Callable[[], int] = _random_seed,
) -> FastAPI:
    """The application that serves `settings.model_name` through `client`, to holders of `keys` only where there are any.

    See `Edge` for the injected sources.
    """
    grammars = GrammarCheck(codec)
    edge = Edge(settings, client, codec, new_id, clock, draw_seed, grammars, Admission(settings.admission))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await grammars.close()

    app = FastAPI(
        lifespan=lifespan,
        title="kvatlas",
        version=installed_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _http_error},
    )
    app.include_router(chat_router(edge))
    app.include_router(completions_router(edge))
    app.include_router(tokenizing_router(edge))
    app.include_router(models_router(settings))
    app.include_router(health_router(edge))
    app.include_router(debug_router(edge))
    install_openapi(app, asks_for_keys=keys is not None)
    if keys is not None:
        app.add_middleware(ApiKeysMiddleware, ring=keys)
    app.add_middleware(LimitsMiddleware)
    app.add_middleware(FailSafeMiddleware)
    if settings.cors_origins:
        app.add_middleware(CorsMiddleware, origins=settings.cors_origins)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RequestIdMiddleware, new_id=new_id, echo=settings.echo_request_id)
    return app


async def _http_error(request: Request, exc: Exception) -> Response:
    """The framework's own errors (no such route, wrong method) in the envelope; OPTIONS gets its answer."""
    if not isinstance(exc, HTTPException):
        raise exc
    where = f"{request.method} {shorten(request.url.path)}"
    if exc.status_code == 404:
        return ApiError(404, f"Invalid URL ({where}).", code="unknown_url").response()
    if exc.status_code == 405:
        headers = {"allow": _allowed(exc)}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        return ApiError(405, f"Method not allowed ({where}).", code="method_not_allowed", headers=headers).response()
    return ApiError(exc.status_code, str(exc.detail), headers=exc.headers).response()


def _allowed(exc: HTTPException) -> str:
    """The route's methods, and the two that every route answers or derives."""
    methods = set((exc.headers or {}).get("Allow", "").replace(" ", "").split(",")) - {""}
    return ", ".join(sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())))
