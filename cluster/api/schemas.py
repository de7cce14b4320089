"""The request bodies: the fields that are honoured, and their ranges.

Strict: a number is not a string and a bool is not a number, because a guess here would be silent. `null` means "not
given" everywhere. Fields that are known but not honoured are listed in `unsupported.py`; all others are ignored, since
SDKs send extras.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cluster.api.text import Text, flatten_content

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

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
_STOP_ITEM_SCHEMA = {"type": "string", "minLength": 1}
_STOP_SCHEMA = {
    "anyOf": [_STOP_ITEM_SCHEMA, {"type": "array", "items": _STOP_ITEM_SCHEMA, "maxItems": 4}, {"type": "null"}]
}
_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1},
    ]
}


def _stop_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Content = Annotated[Text | None, BeforeValidator(flatten_content), WithJsonSchema(_CONTENT_SCHEMA)]
StopText = Annotated[Text, Field(min_length=1)]
StopList = Annotated[
    Annotated[list[StopText], Field(max_length=4, fail_fast=True)] | None,
    BeforeValidator(_stop_as_list),
    WithJsonSchema(_STOP_SCHEMA),
]
PositiveCount = Annotated[int, Field(ge=1)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Fields):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class GenerationFields(_Fields):
    """What both generation routes take."""

    model: Text
    max_tokens: PositiveCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: StopList = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: PositiveCount | None = None
    user: Text | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    prompt_cache_key: Text | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def requested_max_tokens(self) -> int | None:
        """The answer's length limit as the client gave it."""
        return self.max_tokens


class FunctionCall(_Fields):
    """A function call the assistant made earlier; `arguments` is JSON in a string, as OpenAI has it."""

    name: Text
    arguments: Text


class ToolCall(_Fields):
    """One tool call of an earlier assistant turn."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Fields):
    """One turn. Content parts have become one string."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: PositiveCount | None = None

    @property
    def requested_max_tokens(self) -> int | None:
        """`max_completion_tokens` is the newer name of `max_tokens` and wins."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _content_is_there(self) -> ChatRequest:
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise PydanticCustomError(
                    "null_content",
                    "Only an assistant message may have null content",
                    {"param": f"messages.{index}.content"},
                )
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt` is checked in `prompts.py`: its four forms make unreadable union errors here."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
