"""One HTTP call straight into an ASGI application, with the client's side under the test's control."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiCall:
    """Starts `app` at once. `reading` cleared makes the client stop taking bytes; `disconnect()` makes it leave."""

    def __init__(self, app: ASGIApp, path: str, body: Any, method: str = "POST") -> None:
        self.sent: list[Message] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.receive_error: Exception | None = None
        self.send_error: Exception | None = None
        self._gone = asyncio.Event()
        self._request: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._request:
            return self._request.pop()
        await self._gone.wait()
        if self.receive_error is not None:
            raise self.receive_error
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        if self.send_error is not None:
            raise self.send_error
        self.sent.append(message)

    def disconnect(self) -> None:
        """The client closes the connection. Like uvicorn, this also releases a blocked send."""
        self._gone.set()
        self.reading.set()

    @property
    def body(self) -> bytes:
        """What has arrived so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def status(self) -> int | None:
        """The status line, once it has arrived."""
        return self.sent[0]["status"] if self.sent else None


async def eventually(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait until `condition()` is true; fail after `within_s`."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)
