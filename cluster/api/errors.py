"""Every error as OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`, on every route.

One function, `to_api_error`, knows which exception is which status. A client's fault is 400/404/405/413/415 (never
422, which SDKs do not expect), a busy or dying replica is 503 with Retry-After (SDKs retry it), and anything else is
our bug: 500, with the request id in the message and the traceback in the log only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from actors.errors import ReplicaFailed, ReplicaOverloaded, RequestRefused
from cluster.api.json_response import json_response
from kvpool.errors import KvatlasError

logger = logging.getLogger(__name__)

ECHO_CHARS = 200
MESSAGE_CHARS = 1000


class ApiError(KvatlasError):
    """An error response: status, the four envelope fields, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """The body. The type follows from the status: whose fault it is."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The complete HTTP response."""
        return json_response(self.envelope(), self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(503, message, code=code, headers={"retry-after": "1"})


def slow_down(message: str) -> ApiError:
    """A 429: this client alone asks for too much at a time."""
    return ApiError(429, message, code="slow_down", headers={"retry-after": "1"})


def shorten(text: str, limit: int = ECHO_CHARS) -> str:
    """`text` as UTF-8 can hold it, cut to `limit` characters. Whatever a client sent passes here before it is echoed."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def to_api_error(exc: BaseException, request_id: str) -> ApiError:
    """The response for `exc`. Errors of whatever carries requests to the replicas are ours by now: see `EngineClient`."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestRefused):
        return invalid(shorten(exc.message, MESSAGE_CHARS), exc.param, exc.code)
    if isinstance(exc, ReplicaOverloaded):
        return unavailable("The server is overloaded. Retry in a moment.", "server_is_overloaded")
    if isinstance(exc, ReplicaFailed):
        return unavailable("The replica that served this request failed. Retry in a moment.", "replica_failed")
    return ApiError(500, f"The server had an internal error. Quote request id {request_id} when you report it.")


def report(exc: BaseException, request_id: str) -> ApiError:
    """As `to_api_error`, and writes server-side errors to the log: what the client is not shown."""
    error = to_api_error(exc, request_id)
    if error.status == 500:
        logger.error("request %s failed", request_id, exc_info=exc)
    elif error.status > 500:
        logger.warning("request %s: %s: %s", request_id, type(exc).__name__, shorten(str(exc), MESSAGE_CHARS))
    return error
