"""Whether the JSON schema of a tool's parameters is one: told before anything is scheduled, with the place of the fault.

Keywords are checked for their form only. What a schema means is read by whoever turns it into a grammar, and only if one is
needed: a tool that the model may call freely needs its schema only in the prompt.
"""

from __future__ import annotations

import math
from typing import Any

from cluster.api.text import is_text

MAX_DEPTH = 64
"""Objects and arrays in one another. Keeps this module's recursion, and that of the JSON writer, far from Python's limit."""

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_TEXTS = ("$ref", "pattern", "format", "title", "description")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def parameters_problem(parameters: dict[str, Any]) -> str:
    """What is wrong with `parameters` as the schema of an object: an end of the sentence "The schema ...", or ""."""
    problem = _value_problem(parameters, 0)
    if problem:
        return problem
    if "object" not in _listed(parameters.get("type", "object")):
        return "must have the type 'object'"
    return _schema_problem(parameters, "")


def _value_problem(value: Any, depth: int) -> str:
    """Nothing that JSON in UTF-8 cannot say, and not too deep."""
    if isinstance(value, str):
        return "" if is_text(value) else "must not contain an unpaired surrogate (\\ud800 to \\udfff)"
    if isinstance(value, float):
        return "" if math.isfinite(value) else "must not contain a number too large for JSON"
    if not isinstance(value, dict | list):
        return ""
    if depth == MAX_DEPTH:
        return f"must not nest deeper than {MAX_DEPTH} levels"
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return next((problem for item in inner if (problem := _value_problem(item, depth + 1))), "")


def _schema_problem(schema: Any, path: str) -> str:
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return _at(path, "must be an object or a boolean")
    return _keyword_problem(schema, path) or next(
        (problem for where, inner in _inner(schema, path) if (problem := _schema_problem(inner, where))), ""
    )


def _keyword_problem(schema: dict[str, Any], path: str) -> str:
    """The form of the keywords of one schema, down to where another begins."""
    kinds = _listed(schema.get("type", "object"))
    if not kinds or not all(isinstance(kind, str) and kind in TYPES for kind in kinds):
        return _at(_join(path, "type"), f"must be of {', '.join(sorted(TYPES))}, or a list of these")
    for name in _SCHEMAS_BY_NAME:
        if not isinstance(schema.get(name, {}), dict):
            return _at(_join(path, name), "must be an object")
    for name in _SCHEMA_LISTS:
        if name in schema and not (isinstance(schema[name], list) and schema[name]):
            return _at(_join(path, name), "must be an array that is not empty")
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        return _at(_join(path, "required"), "must be an array of strings")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        return _at(_join(path, "enum"), "must be an array that is not empty")
    return _scalar_problem(schema, path)


def _scalar_problem(schema: dict[str, Any], path: str) -> str:
    for name in _TEXTS:
        if not isinstance(schema.get(name, ""), str):
            return _at(_join(path, name), "must be a string")
    for name in _NUMBERS:
        value = schema.get(name, 0)
        # In the oldest drafts the two exclusive bounds are booleans.
        if not isinstance(value, int | float) or (isinstance(value, bool) and not name.startswith("exclusive")):
            return _at(_join(path, name), "must be a number")
    for name in _COUNTS:
        count = schema.get(name, 0)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            return _at(_join(path, name), "must be an integer of 0 or more")
    return ""


def _inner(schema: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """The schemas inside `schema`, with their paths."""
    found = [(_join(path, name), schema[name]) for name in _SCHEMAS if name in schema]
    for name in _SCHEMAS_BY_NAME:
        found += [(f"{_join(path, name)}.{key}", inner) for key, inner in schema.get(name, {}).items()]
    for name in (*_SCHEMA_LISTS, "items"):
        value = schema.get(name, [])
        if isinstance(value, list):
            found += [(f"{_join(path, name)}.{index}", inner) for index, inner in enumerate(value)]
        else:
            found.append((_join(path, name), value))
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(path: str, problem: str) -> str:
    return f"is wrong at '{path}': it {problem}" if path else problem
