"""What a chat request says of tools: which there are, and whether the model may or must call them.

Strict, as all fields. What several fields say together (a choice without tools, a named tool that is not there) is checked
where they are used, in `tools.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.api.errors import shorten
from cluster.api.fields import Fields
from cluster.api.size import at_most
from cluster.api.text import Text
from cluster.api.tool_schema import parameters_problem

MAX_TOOLS = 128
MAX_TOOL_VALUES = 20_000
"""In all of `tools` together."""
NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
MODES = ("none", "auto", "required")


def _checked_parameters(value: dict[str, Any]) -> dict[str, Any]:
    problem = parameters_problem(value)
    if problem:
        raise PydanticCustomError("parameters", "The schema {problem}", {"problem": shorten(problem, 400)})
    return value


class ToolFunction(Fields):
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object.

    `strict`: what the model writes as arguments is held to the schema; a schema that cannot be enforced whole is refused.
    """

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_checked_parameters)] | None = None
    strict: bool | None = None


class Tool(Fields):
    """One entry of `tools`."""

    type: Literal["function"]
    function: ToolFunction


def _names_differ(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            param = f"tools.{index}.function.name"
            raise PydanticCustomError(
                "tool_name", "Tool names must differ; '{name}' is there twice", {"name": name, "param": param}
            )
        seen.add(name)
    return tools


Tools = Annotated[
    Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_names_differ)],
    BeforeValidator(at_most(MAX_TOOL_VALUES)),
]


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool: the model must call it."""

    name: str


def _parsed_choice(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in MODES):
        return value
    if not isinstance(value, dict):
        raise _choice_error("tool_choice", "must be 'none', 'auto', 'required' or an object that names a function")
    if value.get("type") != "function":
        raise _choice_error("tool_choice.type", "must be 'function'")
    function = value.get("function")
    if not isinstance(function, dict):
        raise _choice_error("tool_choice.function", "must be an object with a name")
    if not isinstance(function.get("name"), str):
        raise _choice_error("tool_choice.function.name", "must be a string")
    return NamedTool(function["name"])


def _choice_error(param: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("tool_choice", "The tool choice {problem}", {"problem": problem, "param": param})


_NAMED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": NAME_PATTERN}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_CHOICE_SCHEMA = {"anyOf": [{"type": "string", "enum": list(MODES)}, _NAMED_SCHEMA, {"type": "null"}]}

ToolChoice = Annotated[Any, BeforeValidator(_parsed_choice), WithJsonSchema(_CHOICE_SCHEMA)]
"""After validation: one of `MODES`, a `NamedTool`, or None."""


class ToolRequest(Protocol):
    """A request body that may have tools. A choice of None is "auto" where there are tools, and calls None are parallel."""

    @property
    def tools(self) -> list[Tool] | None:
        """Field of type `Tools | None`."""
        ...

    @property
    def tool_choice(self) -> Any:
        """Field of type `ToolChoice`."""
        ...

    @property
    def parallel_tool_calls(self) -> bool | None:
        """Whether one answer may hold several calls."""
        ...
