from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.api.tool_schema import MAX_DEPTH, parameters_problem


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": ["object", "null"]},
        {"properties": {"a": True, "type": {"type": "string"}, "required": {"type": "number"}}},
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"enum": [1, None, "é"]}}},
        {
            "type": "object",
            "properties": {"l": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": {}}]}}},
        },
        {"type": "object", "properties": {"l": {"items": [{}, {}], "minItems": 0, "exclusiveMinimum": True}}},
        {"type": "object", "additionalProperties": False, "x-own": {"type": "whatever"}},
        nested(MAX_DEPTH),
    ],
)
def test_a_schema_of_an_object_is_taken(schema: dict[str, Any]) -> None:
    assert parameters_problem(schema) == ""


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string"}, "must have the type 'object'"),
        ({"type": []}, "must have the type 'object'"),
        ({"type": "object", "properties": []}, "'properties'"),
        ({"properties": {"a": {"type": "int"}}}, "'properties.a.type'"),
        ({"properties": {"a": {"type": ["string", 1]}}}, "'properties.a.type'"),
        ({"properties": {"a": 1}}, "'properties.a'"),
        ({"properties": {"a": {"items": [{}, 3]}}}, "'properties.a.items.1'"),
        ({"required": "a"}, "'required'"),
        ({"required": [1]}, "'required'"),
        ({"properties": {"a": {"enum": []}}}, "'properties.a.enum'"),
        ({"properties": {"a": {"enum": "b"}}}, "'properties.a.enum'"),
        ({"anyOf": []}, "'anyOf'"),
        ({"allOf": [{}, {"type": "x"}]}, "'allOf.1.type'"),
        ({"$defs": {"d": {"$ref": 1}}}, "'$defs.d.$ref'"),
        ({"properties": {"a": {"pattern": ["x"]}}}, "'properties.a.pattern'"),
        ({"properties": {"a": {"minimum": "1"}}}, "'properties.a.minimum'"),
        ({"properties": {"a": {"minimum": True}}}, "'properties.a.minimum'"),
        ({"properties": {"a": {"maxLength": -1}}}, "'properties.a.maxLength'"),
        ({"properties": {"a": {"maxLength": 1.5}}}, "'properties.a.maxLength'"),
        ({"additionalProperties": "no"}, "'additionalProperties'"),
        ({"description": "\ud800"}, "surrogate"),
        ({"properties": {"\udfff": {}}}, "surrogate"),
        (json.loads('{"const": 1e999}'), "too large"),
        (nested(MAX_DEPTH + 1), "deeper"),
        (nested(500), "deeper"),
    ],
)
def test_what_is_no_schema_of_an_object_is_told_with_its_place(schema: dict[str, Any], said: str) -> None:
    assert said in parameters_problem(schema)
