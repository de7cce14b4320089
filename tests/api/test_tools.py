from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from actors.request import Grammar
from cluster.api.errors import ApiError
from cluster.api.fields import Fields
from cluster.api.tool_fields import ToolChoice, Tools
from cluster.api.tool_format import GENERIC, HERMES, LLAMA3, MISTRAL, ToolFormat
from cluster.api.tool_reader import CallStart
from cluster.api.tools import Tooling, tooling

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
CONTENT = Grammar("json_schema", '{"type": "object"}')
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "1"}
LAYOUTS = pytest.mark.parametrize("layout", [HERMES, GENERIC, LLAMA3, MISTRAL])


class Body(Fields):
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("f", description="Does f.", parameters=SCHEMA), tool("g", strict=None)]
STRICT = [tool("f", parameters=SCHEMA, strict=True), tool("g")]
NAMED = {"type": "function", "function": {"name": "g"}}


def ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"{next(numbers):032x}"


def made(layout: ToolFormat | None = HERMES, content: Grammar | None = None, **body: Any) -> Tooling:
    token_ids = body.pop("token_ids", None)
    return tooling(Body.model_validate(body), layout, ids(), content=content, token_ids=token_ids)


def call(layout: ToolFormat, name: str) -> str:
    body = json.dumps({"name": name, layout.arguments_key: {}})
    return f"[TOOL_CALLS] [{body}]" if layout.array else f"{layout.opening}\n{body}\n{layout.closing}"


def called(one: Tooling, text: str) -> list[str]:
    reader = one.reader()
    assert reader is not None
    return [part.name for part in reader.push(text) + reader.finish() if isinstance(part, CallStart)]


@LAYOUTS
@pytest.mark.parametrize(
    "body", [{}, {"tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "none"}, {"parallel_tool_calls": True}]
)
def test_without_tools_nothing_is_told_and_no_call_can_come(layout: ToolFormat, body: dict[str, Any]) -> None:
    one = made(layout, **body)
    assert (one.template_tools, one.grammar, one.reader(), one.schemas) == (None, None, None, ())
    assert not one.keep_special_tokens
    assert one.messages([SYSTEM, USER]) == [SYSTEM, USER]
    assert made(layout, CONTENT, **body).grammar == CONTENT


@LAYOUTS
def test_auto_is_free_and_calls_are_read(layout: ToolFormat) -> None:
    for body in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        one = made(layout, tools=TOOLS, **body)
        assert (one.grammar, one.schemas) == (None, ())
        assert called(one, call(layout, "f")) == ["f"]
        assert called(one, call(layout, "nobody")) == []
        assert one.reader() is not one.reader()


def test_the_template_gets_the_tools_as_the_client_gave_them() -> None:
    for choice in (None, "auto", "required", NAMED):
        one = made(HERMES, tools=TOOLS, tool_choice=choice)
        assert one.template_tools == [
            tool("f", description="Does f.", parameters=SCHEMA),
            tool("g", parameters={"type": "object", "properties": {}}),
        ]
        assert one.messages([USER, CALLED, RESULT]) == [USER, CALLED, RESULT]


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    one = made(GENERIC, tools=TOOLS)
    assert one.template_tools is None
    messages = one.messages([SYSTEM, USER, CALLED, RESULT])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert all(json.dumps(shown) in messages[0]["content"] for shown in one.shown)
    assert not any("tool_calls" in message for message in messages)


def test_earlier_calls_are_plain_turns_without_tools_too() -> None:
    assert [message["role"] for message in made(GENERIC).messages([USER, CALLED, RESULT])] == [
        "user",
        "assistant",
        "user",
    ]


@LAYOUTS
def test_required_and_a_name_force_calls(layout: ToolFormat) -> None:
    required = made(layout, CONTENT, tools=TOOLS, tool_choice="required")
    assert required.grammar is not None
    assert "start: calls" in required.grammar.text.splitlines()
    assert called(required, call(layout, "f")) == ["f"]
    named = made(layout, tools=TOOLS, tool_choice=NAMED)
    assert named.grammar is not None
    assert '\\"g\\"' in named.grammar.text
    assert '\\"f\\"' not in named.grammar.text
    assert (called(named, call(layout, "g")), called(named, call(layout, "f"))) == (["g"], [])
    once = made(layout, tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False)
    assert named.grammar == once.grammar, "a named tool is called once"


@LAYOUTS
@pytest.mark.parametrize("body", [{"tools": STRICT}, {"tools": TOOLS, "parallel_tool_calls": False}])
def test_what_is_promised_is_held_by_a_grammar(layout: ToolFormat, body: dict[str, Any]) -> None:
    one = made(layout, **body)
    assert one.grammar is not None
    assert "start: calls" not in one.grammar.text.splitlines()
    text = call(layout, "f") if layout.tag_needed else call(layout, "f").removeprefix(layout.opening).strip()
    assert called(one, text) == ["f"]
    if layout.array:
        # The grammar lets a bare array through as text, so it must not be read as calls.
        assert called(one, text.removeprefix(layout.opening)) == []


def test_content_of_a_grammar_is_mixed_with_calls() -> None:
    one = made(HERMES, CONTENT, tools=TOOLS)
    assert one.grammar is not None
    assert "start: content | calls" in one.grammar.text.splitlines()


def test_schemas_that_are_enforced_are_told_with_their_fields() -> None:
    assert [param for param, _ in made(tools=TOOLS, tool_choice="required").schemas] == [
        "tools.0.function.parameters",
        "tools.1.function.parameters",
    ]
    ((param, grammar),) = made(tools=TOOLS, tool_choice=NAMED).schemas
    assert param == "tools.1.function.parameters"
    assert (grammar.kind, json.loads(grammar.text)["additionalProperties"]) == ("json_schema", False)


@pytest.mark.parametrize(
    ("layout", "special", "kept"),
    [
        (HERMES, {}, False),
        (HERMES, {"<tool_call>": 7, "</tool_call>": 8}, True),
        (MISTRAL, {"[TOOL_CALLS]": 5}, True),
        (LLAMA3, {"<|python_tag|>": 9}, False),
    ],
)
def test_special_tokens_are_kept_where_a_tag_is_one(layout: ToolFormat, special: dict[str, int], kept: bool) -> None:
    one = made(layout, tools=TOOLS, tool_choice="required", token_ids=special)
    assert one.keep_special_tokens == kept
    assert one.grammar is not None
    assert all((f"<[{number}]>" in one.grammar.text) == kept for number in special.values())
    assert not made(layout, token_ids=special).keep_special_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": NAMED}, "tool_choice.function.name"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        made(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_tools_without_a_chat_template_are_refused() -> None:
    with pytest.raises(ApiError, match="template"):
        made(None, tools=TOOLS)
    assert made(None).messages([USER]) == [USER]
