"""What an answer must look like: the fields that ask for it, read into a grammar.

| field | value | the answer |
|---|---|---|
| `response_format` | {"type": "text"} | anything |
| | {"type": "json_object"} | any JSON object |
| | {"type": "json_schema", "json_schema": {"name", "schema", "strict"}} | JSON of that schema |
| `structured_outputs` | one of {"json": schema}, {"json_object": true} | JSON |
| | or {"regex": text}, {"choice": [text, ...]}, {"grammar": text} | the text |
| `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | as above, the older names | |

At most one in a request. A schema is enforced whatever `strict` says; one that cannot be enforced in full is refused, with
llguidance's own message. A schema may say in "x-guidance" how llguidance reads it. A grammar is in Lark's syntax as llguidance
extends it, or in GBNF.

Limits: GBNF is converted here, so only short ones are taken. Schemas that refer to others by URL are refused: nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from actors.request import Grammar
from cluster.api.errors import invalid, shorten
from cluster.api.text import is_text

MAX_GBNF_CHARS = 8192
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """What the fields of `body` ask for; None where the answer is free.

    Raises `ApiError` 400 for fields that are malformed or contradict each other. Whether the grammar makes sense is for
    `grammar_check.py` to say.
    """
    asked = _asked(body)
    if len(asked) > 1:
        message = f"'{asked[0][0]}' and '{asked[1][0]}' both say what the answer must look like; give one of them."
        raise invalid(message, asked[1][0])
    return asked[0][1]() if asked else None


def param_of(body: Mapping[str, Any]) -> str:
    """The path of the field that `grammar_of` reads; "" where none asks for anything."""
    asked = _asked(body)
    return asked[0][0] if asked else ""


def _asked(body: Mapping[str, Any]) -> list[tuple[str, Callable[[], Grammar]]]:
    """The path of every field that asks for something, with what reads it. Raises `ApiError` where that cannot be told."""
    asked: list[tuple[str, Callable[[], Grammar]]] = []
    response_format = body.get("response_format")
    if response_format is not None:
        reader = _response_format(response_format)
        if reader is not None:
            asked.append(("response_format", reader))
    structured = body.get("structured_outputs")
    if structured is not None:
        asked.append(_structured_outputs(structured))
    for name, kind in _GUIDED.items():
        if body.get(name) is not None:
            asked.append((name, _reader(kind, body[name], name)))
    return asked


def _response_format(value: Any) -> Callable[[], Grammar] | None:
    path = "response_format"
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be an object.", path)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return lambda: _ANY_OBJECT
    if kind != "json_schema":
        given = "is missing" if kind is None else f"is {shorten(repr(kind), 64)}"
        message = f"'{path}.type' {given}; it must be 'text', 'json_object' or 'json_schema'."
        raise invalid(message, f"{path}.type")
    return lambda: _named_schema(value.get("json_schema"), f"{path}.json_schema")


def _named_schema(value: Any, path: str) -> Grammar:
    """OpenAI's object around a schema. Its description and `strict` change nothing: a schema is always enforced."""
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be an object with 'name' and 'schema'.", path)
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"'{path}.name' must be 1 to 64 letters, digits, '_' or '-'.", f"{path}.name")
    if not isinstance(value.get("strict"), bool | None):
        raise invalid(f"'{path}.strict' must be a boolean.", f"{path}.strict")
    if not isinstance(value.get("description"), str | None):
        raise invalid(f"'{path}.description' must be a string.", f"{path}.description")
    if not isinstance(value.get("schema"), dict):
        raise invalid(f"'{path}.schema' must be a JSON schema: an object.", f"{path}.schema")
    return _schema(value["schema"], f"{path}.schema")


def _structured_outputs(value: Any) -> tuple[str, Callable[[], Grammar]]:
    path = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be an object.", path)
    given = {str(name): item for name, item in value.items() if item is not None and item is not False}
    for name in given:
        if name not in _READERS:
            field = f"{path}.{shorten(name, 64)}"
            raise invalid(f"'{field}' is not supported.", field, "unsupported_parameter")
    if len(given) != 1:
        raise invalid(f"'{path}' must have exactly one of {', '.join(sorted(_READERS))}.", path)
    [(name, item)] = given.items()
    return f"{path}.{name}", _reader(name, item, f"{path}.{name}")


def _reader(kind: str, value: Any, path: str) -> Callable[[], Grammar]:
    return lambda: _READERS[kind](value, path)


def _json(value: Any, path: str) -> Grammar:
    """A schema as an object, or as text that spells one."""
    if isinstance(value, str):
        try:
            value = json.loads(_text(value, path))
        except (ValueError, RecursionError) as error:
            raise invalid(f"'{path}' is not valid JSON: {shorten(str(error))}.", path) from error
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be a JSON schema: an object.", path)
    return _schema(value, path)


def _schema(value: dict[str, Any], path: str) -> Grammar:
    try:
        return Grammar("json_schema", json.dumps(value, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise invalid(f"'{path}' cannot be written as JSON: {shorten(str(error))}.", path) from error


def _json_object(value: Any, path: str) -> Grammar:
    if value is not True:
        raise invalid(f"'{path}' must be a boolean.", path)
    return _ANY_OBJECT


def _regex(value: Any, path: str) -> Grammar:
    return Grammar("regex", _text(value, path))


def _choice(value: Any, path: str) -> Grammar:
    """One of the texts exactly: literals, which nothing in a text can end."""
    if not isinstance(value, list) or not value:
        raise invalid(f"'{path}' must be a list of strings that is not empty.", path)
    texts = [_text(item, f"{path}.{index}") for index, item in enumerate(value)]
    return Grammar("lark", "start: " + " | ".join(json.dumps(text) for text in texts) + "\n")


def _grammar(value: Any, path: str) -> Grammar:
    text = _text(value, path)
    if "::=" not in text:
        return Grammar("lark", text)
    if len(text) > MAX_GBNF_CHARS:
        message = f"'{path}' in GBNF has {len(text)} characters, more than {MAX_GBNF_CHARS}; write it in Lark's syntax."
        raise invalid(message, path)
    try:
        return Grammar("lark", any_to_lark(text))
    except Exception as error:  # the converter raises what it likes
        reason = "it nests too deep" if isinstance(error, RecursionError) else shorten(" ".join(str(error).split()))
        raise invalid(f"'{path}' is no GBNF that can be read: {reason}.", path) from error


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"'{path}' must be a string.", path)
    if not is_text(value):
        raise invalid(f"'{path}' must not contain an unpaired surrogate (\\ud800 to \\udfff).", path)
    return value


_READERS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
