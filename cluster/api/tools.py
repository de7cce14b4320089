"""Tools of one chat request: what the prompt says of them, what the answer may look like, and who reads calls out of it.

| `tool_choice` | the prompt | the answer |
|---|---|---|
| "none" | without tools | is all content |
| "auto" | with tools | free; held to a grammar where that is promised: strict tools, or no parallel calls |
| "required", or a name | with all tools | nothing but calls, by grammar |

A prompt is the same for all choices but "none", so that they share it as a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.request import Grammar
from cluster.api.errors import invalid, shorten
from cluster.api.tool_fields import NamedTool, ToolFunction, ToolRequest
from cluster.api.tool_format import ToolFormat
from cluster.api.tool_grammar import ToolGrammar, arguments_schema
from cluster.api.tool_prompt import as_plain_turns, with_tools
from cluster.api.tool_reader import ToolReader


@dataclass(frozen=True, slots=True)
class Tooling:
    """What follows from the tools of a request.

    `shown`: what the prompt tells of tools. `grammar`: of the whole answer, with the content's own where there is one; None if it
    is free. `keep_special_tokens`: calls are found only if the answer's text keeps special tokens, whatever the client asked for.
    """

    shown: tuple[dict[str, Any], ...]
    grammar: Grammar | None
    keep_special_tokens: bool
    schemas: tuple[tuple[str, Grammar], ...]
    """Schemas that the grammar holds the answer to, each with the path of its field: to be checked one by one, so that an
    error names the tool. Empty where nothing is enforced.
    """
    _layout: ToolFormat | None
    _read: ToolFormat | None
    _names: frozenset[str]
    _new_id: Callable[[], str]

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """What the chat template is given as its tools; None where it takes none, or there are none."""
        takes_them = self._layout is not None and self._layout.in_template
        return list(self.shown) if self.shown and takes_them else None

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` (as chat templates take them, call arguments as objects) for this model's template. Copies.

        Where the template knows nothing of tools, they come in a system message, and earlier calls and results as plain turns.
        """
        if self._layout is None or self._layout.in_template:
            return list(messages)
        plain = as_plain_turns(messages)
        return with_tools(plain, self.shown) if self.shown else plain

    def reader(self) -> ToolReader | None:
        """A new reader, for one choice; None when no call can come, and all text is content."""
        return None if self._read is None else ToolReader(self._read, self._names, self._new_id)


def tooling(
    fields: ToolRequest,
    layout: ToolFormat | None,
    new_id: Callable[[], str],
    *,
    content: Grammar | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> Tooling:
    """What follows from `fields` for a model that writes calls as `layout` says (None: it has no chat template).

    `content` is the grammar that the request gives for content. `token_ids` are the model's special tokens, by their text.
    `new_id` returns an identifier never returned before. Raises `ApiError` 400 for fields that contradict each other.
    """
    functions = [tool.function for tool in fields.tools or []]
    choice = _choice(fields.tool_choice, functions)
    if not functions or choice == "none" or layout is None:
        if functions and layout is None:
            raise invalid("Tools need a chat template, and this model has none.", "tools")
        return Tooling((), content, False, (), layout, None, frozenset(), new_id)
    token_ids = token_ids or {}
    callable_now = [one for one in functions if not isinstance(choice, NamedTool) or one.name == choice.name]
    several = fields.parallel_tool_calls is not False and not isinstance(
        choice, NamedTool
    )  # a named tool is called once
    grammars = ToolGrammar(layout, callable_now, several, token_ids)
    grammar, read = _answer(fields, choice, layout, grammars, content, any(one.strict for one in callable_now))
    return Tooling(
        shown=tuple(map(_shown, functions)),
        grammar=grammar,
        keep_special_tokens=layout.tag_needed and layout.opening in token_ids,
        schemas=_schemas(functions, callable_now) if grammar is not None else (),
        _layout=layout,
        _read=read,
        _names=frozenset(one.name for one in callable_now),
        _new_id=new_id,
    )


def _shown(function: ToolFunction) -> dict[str, Any]:
    """`function` for a prompt. Its parameters are always there: templates look into them."""
    told: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        told["description"] = function.description
    parameters = function.parameters
    told["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": told}


def _choice(choice: Any, functions: Sequence[ToolFunction]) -> Any:
    """`choice`, or what it is where it is not given. Raises `ApiError` where `functions` do not fit it."""
    if choice is None:
        return "auto"
    if not functions and choice != "none":
        raise invalid("'tool_choice' is only allowed with 'tools', unless it is 'none'.", "tool_choice")
    if isinstance(choice, NamedTool) and all(one.name != choice.name for one in functions):
        name = shorten(choice.name)
        raise invalid(f"'tool_choice' names '{name}', which is not in 'tools'.", "tool_choice.function.name")
    return choice


def _answer(
    fields: ToolRequest, choice: Any, layout: ToolFormat, grammars: ToolGrammar, content: Grammar | None, strict: bool
) -> tuple[Grammar | None, ToolFormat]:
    """The grammar of the answer, and the layout in which it is read."""
    if choice != "auto":
        return grammars.forced(), layout
    if content is not None:
        return grammars.mixed(content), layout
    if strict or fields.parallel_tool_calls is False:
        # Only what the grammar took for a call is read as one.
        return grammars.triggered(), replace(layout, bare=False) if layout.tag_needed else replace(layout, opening="")
    return None, layout


def _schemas(all_of_them: Sequence[ToolFunction], enforced: Sequence[ToolFunction]) -> tuple[tuple[str, Grammar], ...]:
    names = {function.name for function in enforced}
    return tuple(
        (f"tools.{index}.function.parameters", Grammar("json_schema", json.dumps(arguments_schema(function))))
        for index, function in enumerate(all_of_them)
        if function.name in names
    )
