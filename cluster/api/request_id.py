"""x-request-id: taken from the client, made harmless, echoed on every response.

The id names the HTTP exchange in logs and in error messages. It is the client's word, so it never becomes the id under
which a replica knows a request: two clients may send the same one.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_CHARS = 128


class RequestIdMiddleware:
    """Puts the id into `scope["state"]["request_id"]` and, with `echo`, into the response's headers."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str], echo: bool = True) -> None:
        self.app = app
        self.new_id = new_id
        self.echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = sanitise(Headers(scope=scope).get("x-request-id", "")) or self.new_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self.echo:
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


def sanitise(raw: str) -> str:
    """The printable ASCII characters of `raw` (no space), at most `MAX_CHARS` of them; may be empty."""
    return "".join(char for char in raw[: 4 * MAX_CHARS] if "!" <= char <= "~")[:MAX_CHARS]


def request_id_of(scope: Scope) -> str:
    """The id that the middleware gave this exchange."""
    return str(scope.get("state", {}).get("request_id", ""))
