"""What all request bodies are made of: their base, and the types that several of them share.

Strict: a number is not a string and a bool is not a number, because a guess here would be silent. Unknown fields are
ignored, since SDKs send extras.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from cluster.api.text import Text, flatten_content

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

_TEXT_PARTS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, _TEXT_PARTS_SCHEMA, {"type": "null"}]}
MAX_STOP_CHARS = 4096
"""Of one stop string: the end of every answer is searched for each of them."""
_STOP_ITEM_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_SCHEMA = {
    "anyOf": [_STOP_ITEM_SCHEMA, {"type": "array", "items": _STOP_ITEM_SCHEMA, "maxItems": 4}, {"type": "null"}]
}


def _stop_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Content = Annotated[Text | None, BeforeValidator(flatten_content), WithJsonSchema(_CONTENT_SCHEMA)]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopList = Annotated[
    Annotated[list[StopText], Field(max_length=4, fail_fast=True)] | None,
    BeforeValidator(_stop_as_list),
    WithJsonSchema(_STOP_SCHEMA),
]
PositiveCount = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Salt = Annotated[Text, Field(min_length=1, max_length=128, pattern=r"^[^\x00]*$")]
"""Without NUL, which parts it from the salt of the client's key."""


class Fields(BaseModel):
    """The base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
