"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.body import read_object
from cluster.api.edge import Edge
from cluster.api.errors import invalid
from cluster.api.generation import GenerationResponse
from cluster.api.openapi import json_body
from cluster.api.plan import Plan, check_messages, plan, tokenize
from cluster.api.reply import Outcome
from cluster.api.schemas import ChatRequest, Message, ToolCall
from cluster.api.session import session_of
from cluster.api.validation import validate


class ChatShape:
    """Choices of a chat reply."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The role, once, with empty content."""
        return _chunk_choice(choice, {"role": "assistant", "content": ""})

    def text(self, choice: int, text: str) -> dict[str, Any]:
        """New content."""
        return _chunk_choice(choice, {"content": text})

    def finish(self, choice: int, outcome: Outcome) -> dict[str, Any]:
        """An empty delta with the reason."""
        ending = {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}
        return _chunk_choice(choice, {}) | ending

    def whole(self, choice: int, outcome: Outcome) -> dict[str, Any]:
        """The assistant's message."""
        return {
            "index": choice,
            "message": {"role": "assistant", "content": outcome.content, "refusal": None},
            "logprobs": None,
            "finish_reason": outcome.finish_reason,
            "stop_reason": outcome.stop_reason,
        }


def chat_router(edge: Edge) -> APIRouter:
    """The route, bound to `edge`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None, openapi_extra=json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        body = await read_object(request, edge.settings.max_body_bytes)
        fields, planned = await plan_chat(edge, body, session_of(request))
        return GenerationResponse(edge, fields, ChatShape(), planned)

    return router


async def plan_chat(edge: Edge, body: dict[str, Any], session: str = "") -> tuple[ChatRequest, Plan]:
    """`body`, checked, rendered and tokenized, of the client's `session`. Raises `ApiError`."""
    fields = validate(ChatRequest, body, edge.settings.model_name)
    check_messages(edge, len(fields.messages))
    messages = [template_message(index, message) for index, message in enumerate(fields.messages)]
    texts = [message.content or "" for message in fields.messages]
    prompt = await tokenize(edge, [texts], lambda: edge.codec.render_chat(messages), param="messages")
    return fields, plan(edge, fields, [prompt], param="messages", default_max_tokens=None, session=session)


def template_message(index: int, message: Message) -> dict[str, Any]:
    """`message` as chat templates expect it: no nulls, and the call arguments as objects.

    "developer" is OpenAI's newer name of "system"; templates know the old one.
    """
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        path = f"messages.{index}.tool_calls"
        rendered["tool_calls"] = [_template_call(f"{path}.{at}", call) for at, call in enumerate(message.tool_calls)]
    return rendered


def _template_call(path: str, call: ToolCall) -> dict[str, Any]:
    param = f"{path}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise invalid(f"'{param}' must be JSON in a string.", param) from None
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _chunk_choice(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
