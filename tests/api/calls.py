"""Request bodies and the checks that every error response gets."""

from __future__ import annotations

from typing import Any

import httpx

from tests.api.sse_oracle import ENVELOPE_KEYS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "org/tiny"


def chat_body(**fields: Any) -> dict[str, Any]:
    """A valid chat request, with some fields set."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields


def completion_body(**fields: Any) -> dict[str, Any]:
    """A valid completion request, with some fields set."""
    return {"model": MODEL, "prompt": "Hi"} | fields


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of `response`, which must be exactly an OpenAI envelope with `status`."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == ENVELOPE_KEYS
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 1100
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    if status == 503:
        assert response.headers["retry-after"] == "1"
    return error
