"""From the messages of a request to token ids, through the model's chat template.

The template is the model's own; a request can only set variables of it (`chat_template_kwargs`), and say how the conversation
goes on: with a new turn of the assistant (default), within the last message, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from cluster.api.edge import Edge
from cluster.api.errors import invalid
from cluster.api.plan import check_messages, tokenize
from cluster.api.schemas import Message, ToolCall
from cluster.api.tools import Tooling


class Turn(Protocol):
    """How a conversation is rendered."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the assistant's turn is begun; None: unless the last message goes on."""
        ...

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the answer goes on where the last message ends."""
        ...

    @property
    def add_special_tokens(self) -> bool | None:
        """Whether the tokenizer adds its start tokens to those that the template writes."""
        ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Variables for the template."""
        ...


async def render(edge: Edge, messages: Sequence[Message], turn: Turn, tooling: Tooling) -> list[int]:
    """The token ids of `messages`. Raises `ApiError` and `RequestRefused`, both 400."""
    try:
        return await _render(edge, messages, turn, tooling)
    except RecursionError:  # what was read may still be too deep to be written
        raise invalid("Call arguments or template variables are nested too deeply.", "messages") from None


async def _render(edge: Edge, messages: Sequence[Message], turn: Turn, tooling: Tooling) -> list[int]:
    check_messages(edge, len(messages))
    rendered = tooling.messages([template_message(index, message) for index, message in enumerate(messages)])
    tools, variables = tooling.template_tools, turn.chat_template_kwargs or {}
    continues = bool(turn.continue_final_message)
    begins = not continues if turn.add_generation_prompt is None else turn.add_generation_prompt

    def work() -> list[int]:
        return edge.codec.render_chat(
            rendered,
            tools=tools,
            add_generation_prompt=begins,
            continue_final_message=continues,
            add_special_tokens=bool(turn.add_special_tokens),
            variables=variables,
        )

    texts = [str(message["content"]) for message in rendered]
    texts += [call.function.arguments for message in messages for call in message.tool_calls or ()]
    texts += [_json(value) for value in (*(tools or ()), *variables.values())]
    return await tokenize(edge, [texts], work, param="messages")


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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
