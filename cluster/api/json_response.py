"""JSON as bytes, for bodies and for stream events alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

# `json.dumps` makes a new one at each call with options.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# Ends of lines to Unicode, not to JSON: clients that read a stream line by line would cut an event in two.
_LINE_ENDS = (("\u2028", "\\u2028"), ("\u2029", "\\u2029"), ("\x85", "\\u0085"))


def encode_json(value: Any) -> bytes:
    """UTF-8 JSON of `value`, on one line. Never fails on text: a lone surrogate, which UTF-8 cannot hold, becomes "?"."""
    text = _ENCODER.encode(value)
    if not text.isascii():
        for character, escaped in _LINE_ENDS:
            text = text.replace(character, escaped)
    return text.encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A complete response with `value` as its body."""
    return Response(encode_json(value), status, dict(headers or {}), "application/json")
