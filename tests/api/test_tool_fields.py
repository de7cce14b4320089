from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.api.fields import Fields
from cluster.api.tool_fields import MAX_TOOLS, NamedTool, ToolChoice, Tools


class Body(Fields):
    tools: Tools | None = None
    tool_choice: ToolChoice = None


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def fault(**body: Any) -> tuple[str, str]:
    """The path that a client is told, and the message."""
    with pytest.raises(ValidationError) as caught:
        Body.model_validate(body)
    detail = caught.value.errors()[0]
    return str(detail.get("ctx", {}).get("param") or ".".join(map(str, detail["loc"]))), detail["msg"]


def test_a_whole_tool_is_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": None}}, "required": ["a"]}
    body = Body.model_validate({"tools": [tool("get-it_1", description="d", parameters=schema, strict=True), tool()]})
    assert body.tools is not None
    first, second = (one.function for one in body.tools)
    assert (first.name, first.description, first.parameters, first.strict) == ("get-it_1", "d", schema, True)
    assert (second.name, second.description, second.parameters, second.strict) == ("f", None, None, None)


def test_null_is_not_given() -> None:
    body = Body.model_validate({"tools": None, "tool_choice": None})
    assert (body.tools, body.tool_choice) == (None, None)
    assert Body.model_validate({"tools": [tool(description=None, parameters=None, strict=None)]}).tools


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([], "tools"),
        ({}, "tools"),
        ([tool(f"f{index}") for index in range(MAX_TOOLS + 1)], "tools"),
        ([{"function": {"name": "f"}}], "tools.0.type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools.0.type"),
        ([{"type": "function"}], "tools.0.function"),
        ([tool(), {"type": "function", "function": {}}], "tools.1.function.name"),
        ([tool("")], "tools.0.function.name"),
        ([tool("a b")], "tools.0.function.name"),
        ([tool("é")], "tools.0.function.name"),
        ([tool("f\n")], "tools.0.function.name"),
        ([tool("x" * 65)], "tools.0.function.name"),
        ([tool("a"), tool("b"), tool("a")], "tools.2.function.name"),
        ([tool(description=1)], "tools.0.function.description"),
        ([tool(description="\ud800")], "tools.0.function.description"),
        ([tool(strict="yes")], "tools.0.function.strict"),
        ([tool(parameters=[])], "tools.0.function.parameters"),
        ([tool(parameters="{}")], "tools.0.function.parameters"),
        ([tool(), tool("g", parameters={"type": "nosuch"})], "tools.1.function.parameters"),
    ],
)
def test_a_wrong_tool_is_refused_with_its_path(tools: Any, param: str) -> None:
    assert fault(tools=tools)[0] == param


def test_as_many_tools_as_may_be_are_taken() -> None:
    assert (
        len(Body.model_validate({"tools": [tool(f"f{index}") for index in range(MAX_TOOLS)]}).tools or []) == MAX_TOOLS
    )


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_a_mode_is_read(choice: str) -> None:
    assert Body.model_validate({"tool_choice": choice}).tool_choice == choice


def test_a_named_tool_is_read() -> None:
    body = Body.model_validate({"tool_choice": {"type": "function", "function": {"name": "f"}}})
    assert body.tool_choice == NamedTool("f")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        (True, "tool_choice"),
        ([], "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": "f"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": 1}}, "tool_choice.function.name"),
    ],
)
def test_a_wrong_choice_is_refused_with_its_path(choice: Any, param: str) -> None:
    assert fault(tool_choice=choice)[0] == param
