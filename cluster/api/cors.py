"""Which web pages may use the server from a browser: those of the origins named, and no others.

Only exact origins count (scheme, host, port), and no answer ever allows credentials: a page has to hold an API key itself, so
nothing that a browser sends by itself opens anything. A preflight allows whatever headers it asks for, because SDKs send many
of their own and without credentials a header gives a page no power. A page of another origin gets its answer without these
headers, which the browser then keeps from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = "GET, HEAD, POST, OPTIONS"
EXPOSED = "x-request-id, retry-after"
MAX_AGE_S = 600
MOST_HEADERS = 64
_TOKEN = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")


class CorsMiddleware:
    """Adds the headers for `origins`, and answers their preflights."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self.app = app
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        allowed = origin in self.origins
        if allowed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers.get("access-control-request-headers", ""))(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.add_vary_header("Origin")  # the answer depends on it, also where it is not there
                if allowed:
                    answer["access-control-allow-origin"] = origin
                    answer["access-control-expose-headers"] = EXPOSED
            await send(message)

        await self.app(scope, receive, send_with_headers)


def _preflight(origin: str, asked: str) -> Response:
    names = [name.strip().lower() for name in asked.split(",", MOST_HEADERS)[:MOST_HEADERS]]
    headers = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": ", ".join(name for name in names if _TOKEN.fullmatch(name)),
        "access-control-max-age": str(MAX_AGE_S),
        "vary": "Origin",
    }
    return Response(status_code=204, headers=headers)
