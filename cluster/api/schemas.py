"""The request bodies: the fields that are honoured, and their ranges.

`null` means "not given" everywhere. Fields that are known but not honoured are listed in `unsupported.py`; all others are
ignored, since SDKs send extras. What must hold between fields is checked in `validation.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from cluster.api.fields import (
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    Content,
    Fields,
    Penalty,
    PositiveCount,
    Salt,
    StopList,
    TokenId,
)
from cluster.api.logit_bias import LogitBias
from cluster.api.size import at_most
from cluster.api.text import Text
from cluster.api.tool_fields import ToolChoice, Tools

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 8192

_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1},
    ]
}
_OBJECT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_JSON_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}
_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "schema": {"type": "object"},
                        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    },
                },
            },
            "required": ["type"],
        },
        {"type": "null"},
    ]
}
_TEXTS_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "null"}]
}
_TEXT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}

# Checked in `structured.py`, which knows what grammars can be made of.
AnObject = Annotated[Any, WithJsonSchema(_OBJECT_SCHEMA)]
ASchema = Annotated[Any, WithJsonSchema(_JSON_SCHEMA)]
AnyText = Annotated[Any, WithJsonSchema(_TEXT_SCHEMA)]
AnyTexts = Annotated[Any, WithJsonSchema(_TEXTS_SCHEMA)]


class StreamOptions(Fields):
    """What a stream carries besides text. `continuous_usage_stats`: the usage so far, in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Fields):
    """What both generation routes take."""

    model: Text
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    stop: StopList = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: PositiveCount | None = None
    user: Text | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: Text | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Annotated[Any, WithJsonSchema(_FORMAT_SCHEMA)] = None
    structured_outputs: AnObject = None
    guided_json: ASchema = None
    guided_regex: AnyText = None
    guided_choice: AnyTexts = None
    guided_grammar: AnyText = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every chunk of the stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def requested_max_tokens(self) -> int | None:
        """The answer's length limit as the client gave it: `max_completion_tokens` is its newer name and wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """How many alternatives to tell of with each token; None for no log probabilities."""
        return None

    @property
    def choices_per_prompt(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1


class FunctionCall(Fields):
    """A function call the assistant made earlier; `arguments` is JSON in a string, as OpenAI has it."""

    name: Text
    arguments: Text


class ToolCall(Fields):
    """One tool call of an earlier assistant turn."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


MAX_MESSAGE_VALUES = 100_000
"""In all messages of a request together: their fields, parts and tool calls."""
MAX_VARIABLE_VALUES = 10_000


class Message(Fields):
    """One turn. Content parts have become one string."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None


def require_content(messages: list[Message]) -> None:
    """Raise `PydanticCustomError` for a message that says nothing and may not."""
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise PydanticCustomError(
                "null_content",
                "Only an assistant message may have null content",
                {"param": f"messages.{index}.content"},
            )


Messages = Annotated[
    Annotated[list[Message], Field(min_length=1, fail_fast=True)], BeforeValidator(at_most(MAX_MESSAGE_VALUES))
]
TemplateVariables = Annotated[dict[Text, Any], BeforeValidator(at_most(MAX_VARIABLE_VALUES))]


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @property
    def requested_logprobs(self) -> int | None:
        """`top_logprobs`, if `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _content_is_there(self) -> ChatRequest:
        require_content(self.messages)
        return self


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt` is checked in `prompts.py`: its four forms make unreadable union errors here."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def requested_logprobs(self) -> int | None:
        """`logprobs` as it is; 0 tells of the chosen tokens alone."""
        return self.logprobs


class TokenizeRequest(Fields):
    """POST /tokenize: a `prompt`, or `messages` as for chat."""

    model: Text | None = None
    prompt: Annotated[Text, Field(min_length=1)] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _content_is_there(self) -> TokenizeRequest:
        require_content(self.messages or [])
        return self


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: Text | None = None
    tokens: list[TokenId]
