from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from cluster.api.tool_prompt import as_plain_turns, with_tools

TOOL = {"type": "function", "function": {"name": "f", "description": "Größe", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}


def called(*arguments: dict[str, Any], content: str = "") -> dict[str, Any]:
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": one}}
        for at, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "c0"}


def test_tools_are_told_in_a_new_system_message() -> None:
    messages = with_tools([USER], [TOOL])
    assert [message["role"] for message in messages] == ["system", "user"]
    assert json.dumps(TOOL, ensure_ascii=False) in messages[0]["content"].split("\n")
    assert "<tool_call>" in messages[0]["content"]


def test_tools_join_the_system_message_that_is_there() -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = with_tools([system, USER], [TOOL])
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"] == "Be brief.\n\n" + with_tools([USER], [TOOL])[0]["content"]
    assert system["content"] == "Be brief."


def test_calls_become_what_the_model_wrote_and_results_a_turn_of_the_user() -> None:
    messages = [USER, called({"a": "é"}, content="Wait."), result("42")]
    before = deepcopy(messages)
    assert as_plain_turns(messages) == [
        USER,
        {"role": "assistant", "content": 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'},
        {"role": "user", "content": "<tool_response>\n42\n</tool_response>"},
    ]
    assert messages == before


def test_turns_go_on_alternating() -> None:
    messages = [
        USER,
        called({}, {"b": 1}),
        result("1"),
        result("2"),
        USER,
        {"role": "assistant", "content": "Done."},
        USER,
    ]
    plain = as_plain_turns(messages)
    assert [message["role"] for message in plain] == ["user", "assistant", "user", "assistant", "user"]
    assert plain[1]["content"].count("<tool_call>") == 2
    assert plain[2]["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nHi"
    # Who does not alternate is told so by the template, after a result as well.
    assert [message["role"] for message in as_plain_turns([USER, called({}), result("1"), USER, USER])][-2:] == [
        "user",
        "user",
    ]
    assert as_plain_turns([USER, USER]) == [USER, USER]
