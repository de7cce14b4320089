"""Tools for a model whose chat template knows nothing of them: told in the system message, calls and results as plain turns.

The text is the same for every request with the same tools, so conversations share it as a prefix. A template that takes no
system message refuses it with its own words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.api.tool_format import GENERIC

_BEFORE = (
    "You can call functions. Each line between <tools> and </tools> describes one as JSON, with the JSON schema of its "
    "parameters:"
)
_AFTER = (
    "To call a function, answer with its name and its arguments as JSON between tags, as below, once for each call. The result "
    "comes back between <tool_response> and </tool_response>. Without a fitting function, answer in plain text."
)
_EXAMPLE = '{"name": "the function\'s name", "arguments": {"a parameter": "its value"}}'


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with `tools` described in a system message: the first one, if there is one, else a new one. Copies."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    text = "\n".join((_BEFORE, "<tools>", *lines, "</tools>", _AFTER, _tagged(_EXAMPLE)))
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        own = first["content"]
        return [{**first, "content": f"{own}\n\n{text}" if own else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_plain_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` without tool calls and without the role "tool": calls become what the model had written, results a user's turn.

    Several results, and a user's message after them, become one turn: many templates insist that user and assistant
    alternate. Copies what it changes.
    """
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            turn = {"role": "user", "content": text}
        elif message.get("tool_calls"):
            turn = _answer(message)
        else:
            turn = message
        if after_result and turn["role"] == "user":
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{turn['content']}"}
        else:
            plain.append(turn)
        after_result = message["role"] == "tool"
    return plain


def _answer(message: dict[str, Any]) -> dict[str, Any]:
    calls = [_tagged(_call_json(call["function"])) for call in message["tool_calls"]]
    content = "\n".join(([message["content"]] if message["content"] else []) + calls)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _call_json(function: dict[str, Any]) -> str:
    call = {"name": function["name"], GENERIC.arguments_key: function["arguments"]}
    return json.dumps(call, ensure_ascii=False)


def _tagged(text: str) -> str:
    return f"{GENERIC.opening}\n{text}\n{GENERIC.closing}"
