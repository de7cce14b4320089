"""The request body: bounded, JSON, an object. Read here rather than by the framework, which has no bound."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from cluster.api.errors import ApiError, invalid, shorten
from cluster.api.lifeline import ClientGone

BODY_S = 60.0
"""What a client has to send its body. Whoever needs longer holds a connection for nothing."""


async def read_object(request: Request, max_body_bytes: int) -> dict[str, Any]:
    """The body of `request` as a dict.

    Raises `ApiError` 415, 413, 408 or 400, and `ClientGone` when the client leaves before the end of its body.
    """
    _check_headers(request, max_body_bytes)
    try:
        async with asyncio.timeout(BODY_S):
            raw = await _read(request, max_body_bytes)
    except TimeoutError:
        message = f"The request body did not arrive within {BODY_S:g} s."
        raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise invalid("The request body is not valid UTF-8.", code="invalid_json") from exc
    except RecursionError as exc:
        raise invalid("The request body is nested too deeply.", code="invalid_json") from exc
    except ValueError as exc:  # JSONDecodeError, and integers of thousands of digits
        raise invalid(f"The request body is not valid JSON: {shorten(str(exc))}", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.")
    return value


def _check_headers(request: Request, max_body_bytes: int) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"Content-Type must be application/json, not '{shorten(kind)}'.")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"Content-Encoding '{shorten(coding)}' is not supported; send the body uncompressed.")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_body_bytes:
        raise _too_large(max_body_bytes)


async def _read(request: Request, max_body_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_body_bytes:
            raise _too_large(max_body_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_body_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {max_body_bytes} bytes.", code="request_too_large")
