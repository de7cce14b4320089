"""`logit_bias`: what is added to the logits of single tokens, by token id.

JSON has only strings as names, so the ids are strings of digits, in the one spelling that an id has: two spellings of one
id could carry two values. Limit: 1,024 entries.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.api.errors import shorten

MAX_ENTRIES = 1024
_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_ENTRIES,
        },
        {"type": "null"},
    ]
}


def _by_id(value: Any) -> Any:
    """The names as integers. Raises `PydanticCustomError` for one that is no token id."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_ENTRIES:
        raise PydanticCustomError("logit_bias", f"At most {MAX_ENTRIES} tokens may have a bias")
    return {_token_id(name): bias for name, bias in value.items()}


def _token_id(name: str) -> int:
    if name.isascii() and name.isdigit() and len(name) < 20 and str(int(name)) == name:
        return int(name)
    raise PydanticCustomError("logit_bias", "'{name}' is not a token id", {"name": shorten(name, 40)})


LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_by_id), WithJsonSchema(_SCHEMA)
]
