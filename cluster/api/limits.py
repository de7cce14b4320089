"""Bounds on what comes before the body: the URL and the headers. (`cluster.api.body` bounds the body.)

A proxy in front that has narrower bounds answers itself; these hold wherever requests come from.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.errors import ApiError

URL_BYTES = 8192
HEADERS = 128
HEADER_BYTES = 16_384
"""All names and values together; prompts belong into the body. With the URL, less than the buffer of the proxy holds
(`cluster.haproxy`): what that cannot hold never gets here."""


class LimitsMiddleware:
    """Refuses what exceeds the bounds: 414 for the URL, 431 for the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            check_url(scope)
            check_headers(scope)
        await self.app(scope, receive, send)


def check_url(scope: Scope) -> None:
    """Raise `ApiError` 414 for a path and query of more than `URL_BYTES`, as the client sent them."""
    path = scope.get("raw_path") or str(scope["path"]).encode("utf-8", "surrogateescape")
    size = len(path) + len(scope.get("query_string", b""))
    if size > URL_BYTES:
        raise ApiError(414, f"The URL has {size} bytes: {URL_BYTES} are the most.", code="url_too_long")


def check_headers(scope: Scope) -> None:
    """Raise `ApiError` 431 for more than `HEADERS` headers, or more than `HEADER_BYTES` of them."""
    headers = scope["headers"]
    if len(headers) > HEADERS:
        raise _too_large(f"has {len(headers)} headers: {HEADERS} are the most.")
    size = sum(len(name) + len(value) for name, value in headers)
    if size > HEADER_BYTES:
        raise _too_large(f"has {size} bytes of headers: {HEADER_BYTES} are the most.")


def _too_large(what: str) -> ApiError:
    return ApiError(431, f"The request {what}", code="headers_too_large")
