"""Server-sent events, as OpenAI's clients read them: `data: {json}`, blank line, and `[DONE]` at the end.

After the status line has gone out an error can only travel inside the stream, and the stream still ends with `[DONE]`:
clients wait for it. A comment now and then keeps proxies from closing a stream that has nothing to say yet; readers of
events do not see it. Each event is one message to the server, so a cancellation never cuts one in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from cluster.api.json_response import encode_json

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back until its buffer is full
}


class SseWriter:
    """Writes one event stream to an ASGI `send`: `start`, then `event`s, then `done`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self, headers: Mapping[str, str]) -> None:
        """Send the 200 and the headers."""
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in {**HEADERS, **headers}.items()]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def event(self, value: Any) -> None:
        """Send `value` as one event."""
        await self.encoded_event(encode_json(value))

    async def encoded_event(self, value: bytes) -> None:
        """Send `value`, JSON on one line, as one event."""
        await self._body(b"data: " + value + b"\n\n", more=True)

    async def keep_alive(self) -> None:
        """Send a comment."""
        await self._body(b": keep-alive\n\n", more=True)

    async def done(self) -> None:
        """Send the end mark and close the body."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
