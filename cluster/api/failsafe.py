"""The last stop of every exception: the envelope if there is still time for a status line.

Starlette's own handler for unexpected exceptions raises them again after answering, which servers log a second time as
their own failure. So errors end here.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.errors import report
from cluster.api.lifeline import ClientGone
from cluster.api.request_id import request_id_of


class FailSafeMiddleware:
    """Turns an exception of the application into an error response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watching_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watching_send)
        except ClientGone:
            return  # nobody is there to be answered
        except Exception as exc:
            error = report(exc, request_id_of(scope))
            if started:
                raise  # the server must cut the connection: the body is not what was promised
            await error.response()(scope, receive, send)
