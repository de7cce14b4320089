"""What an answer with tool calls must look like, as a grammar in llguidance's language.

Three kinds. `forced`: nothing but calls. `triggered`: free text, but whatever begins as a call is one. `mixed`: calls, or
content that has a grammar of its own. Arguments are held to the tool's schema, and written as Python's json module does, the way
models see JSON in training; without that a small model may fill its answer with white space.

Limits: without `strict`, keywords that llguidance does not know are passed over, and oneOf is read as anyOf. In the layouts that
need no tag, `triggered` text cannot begin as a call does, with a brace. llguidance cuts text greedily, so in `mixed` answers a
Lark grammar whose terminals are pieces of an opening tag loses what begins so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from actors.request import Grammar
from cluster.api.errors import invalid
from cluster.api.tool_fields import ToolFunction
from cluster.api.tool_format import ToolFormat

WRITTEN: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written, in llguidance's words."""

_TEXT = r"TEXT: /(.|\n)*/"


class ToolGrammar:
    """Of one request: `functions` may be called, one or (`several`) more in an answer.

    `token_ids` are those of special tokens, by their text: a tag among them is that token, not its letters.
    """

    def __init__(
        self, layout: ToolFormat, functions: Sequence[ToolFunction], several: bool, token_ids: Mapping[str, int]
    ) -> None:
        self._layout = layout
        self._functions = functions
        self._several = several and layout.several
        self._token_ids = token_ids

    def forced(self) -> Grammar:
        """One call at least, and no other text."""
        return _grammar("start: calls", *self._calls())

    def mixed(self, content: Grammar) -> Grammar:
        """As `forced`, or what `content` describes."""
        return _grammar("start: content | calls", f"content: {_nested(content)}", *self._calls())

    def triggered(self) -> Grammar:
        """Free text with calls in it, or none."""
        layout = self._layout
        if not layout.tag_needed:
            return _grammar("start: free | calls", r"free: /\s*([^{\s](.|\n)*)?/", *self._calls())
        many = self._several and not layout.array
        start = "start: (trigger body)* text" if many else "start: text | trigger body"
        trigger = "trigger: spelled"
        if layout.opening in self._token_ids:
            trigger = f"trigger: spelled | text {self._tag(layout.opening)}"
        # Lazy: it ends with the first tag, so no text contains one.
        spelled = f"spelled[lazy]: TEXT {_literal(layout.opening)}"
        return _grammar(start, trigger, spelled, "text: TEXT", _TEXT, f"body: {self._body()}", *self._objects())

    def _calls(self) -> list[str]:
        layout = self._layout
        if not layout.tag_needed:
            return ["calls: object", *self._objects()]
        call = f"{self._tag(layout.opening)} body"
        many = self._several and not layout.array
        return [
            'calls: call ("\\n" call)*' if many else "calls: call",
            f"call: {call}",
            f"body: {self._body()}",
            *self._objects(),
        ]

    def _body(self) -> str:
        """What follows an opening tag."""
        if self._layout.array:
            return '" [" object (", " object)* "]"' if self._several else '" [" object "]"'
        return f'"\\n" object "\\n" {self._tag(self._layout.closing)}'

    def _objects(self) -> list[str]:
        lines = ["object: " + " | ".join(f"object_{index}" for index in range(len(self._functions)))]
        for index, function in enumerate(self._functions):
            pieces = ["{", json.dumps("name"), ": ", json.dumps(function.name), ", "]
            pieces += [json.dumps(self._layout.arguments_key), ": "]
            # Where other JSON may stand in a call's place, its pieces must be those of JSON: text is cut greedily.
            head = pieces if not self._layout.tag_needed else ["".join(pieces)]
            schema = json.dumps(arguments_schema(function))
            lines.append(f'object_{index}: {" ".join(map(_literal, head))} arguments_{index} "}}"')
            lines.append(f"arguments_{index}: %json {schema}")
        return lines

    def _tag(self, tag: str) -> str:
        return f"<[{self._token_ids[tag]}]>" if tag in self._token_ids else _literal(tag)


def arguments_schema(function: ToolFunction) -> dict[str, Any]:
    """The schema of `function`'s arguments as llguidance is to read it. No parameters at all: an empty object."""
    schema: dict[str, Any] = {"properties": {}, "additionalProperties": False}
    if function.parameters is not None:
        schema = function.parameters
    reading = WRITTEN if function.strict else {**WRITTEN, "lenient": True, "coerce_one_of": True}
    return {**_read_as(schema, reading), "type": "object"}


def _read_as(schema: dict[str, Any], reading: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with `reading` where it does not itself say how it is to be read."""
    own = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**reading, **own} if isinstance(own, dict) else own}


def _nested(content: Grammar) -> str:
    if content.kind == "json_schema":
        return f"%json {_with_reading(content.text)}"
    if content.kind == "regex":
        return f"/{regex_to_lark(content.text, '')}/"
    return f"%lark {{\n{content.text}\n}}"


def _with_reading(text: str) -> str:
    try:
        schema = json.loads(text)
        return json.dumps(_read_as(schema, WRITTEN) if isinstance(schema, dict) else schema)
    except RecursionError:
        raise invalid("The schema of 'response_format' nests too deep.", "response_format") from None


def _literal(text: str) -> str:
    return json.dumps(text)


def _grammar(*lines: str) -> Grammar:
    return Grammar("lark", "\n".join(lines) + "\n")
