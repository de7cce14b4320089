"""The JSON schemas of what the routes reply, for /openapi.json.

They forbid unknown members, so whoever adds a member to a reply adds it here: the tests hold replies to these schemas.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_IDS: Schema = {"type": "array", "items": _COUNT}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_ERROR = _object({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)})
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    },
    {"prompt_tokens_details": _object({"cached_tokens": _COUNT})},
)
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_STOPPED_BY = {"anyOf": [_TEXT, _COUNT, {"type": "null"}]}
_TOKEN: Schema = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_CHAT_LOGPROBS = _object(
    {"content": _list(_object(_TOKEN | {"top_logprobs": _list(_object(_TOKEN))})), "refusal": {"type": "null"}}
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_NUMBER),
        "top_logprobs": _list({"type": "object", "additionalProperties": _NUMBER}),
        "text_offset": _IDS,
    }
)
_CALL = _object({"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})})
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _or_null(_TEXT), "refusal": {"type": "null"}},
    {"tool_calls": _list(_CALL)},
)
_CHOICE: Schema = {"index": _COUNT, "finish_reason": _FINISH, "stop_reason": _STOPPED_BY}
_CHAT_CHOICE = _object(
    _CHOICE | {"message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS)},
    {"token_ids": _IDS},
)
_COMPLETION_CHOICE = _object(
    _CHOICE | {"text": _TEXT, "logprobs": _or_null(_COMPLETION_LOGPROBS)},
    {"token_ids": _IDS, "prompt_token_ids": _IDS},
)
_HEAD: Schema = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _TEXT, "usage": _USAGE}
_CARD = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": _TEXT,
        "parent": {"type": "null"},
        "max_model_len": _COUNT,
    }
)

REPLY_SCHEMAS: dict[str, Schema] = {
    "ErrorReply": _object({"error": _ERROR}),
    "ChatReply": _object(
        _HEAD | {"object": {"const": "chat.completion"}, "choices": _list(_CHAT_CHOICE)}, {"prompt_token_ids": _IDS}
    ),
    "CompletionReply": _object(_HEAD | {"object": {"const": "text_completion"}, "choices": _list(_COMPLETION_CHOICE)}),
    "ModelCard": _CARD,
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_ref("ModelCard"))}),
    "TokenizeReply": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _IDS}, {"token_strs": _list(_TEXT)}),
    "DetokenizeReply": _object({"prompt": _TEXT}),
    "Health": {"type": "object", "properties": {"status": _TEXT}, "required": ["status"]},
    "Version": _object({"version": _TEXT}),
}
