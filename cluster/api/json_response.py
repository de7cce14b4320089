"""JSON as bytes, for bodies and for stream events alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

# `json.dumps` makes a new one at each call with options.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(value: Any) -> bytes:
    """UTF-8 JSON of `value`. Never fails on text: a lone surrogate, which UTF-8 cannot hold, becomes "?"."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A complete response with `value` as its body."""
    return Response(encode_json(value), status, dict(headers or {}), "application/json")
