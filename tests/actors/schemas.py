"""A hundred JSON schemas of varied shape, nearly all bounded so that an answer comes to an end whoever writes it."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(properties: dict[str, Any], *optional: str, **more: Any) -> Schema:
    """An object of `properties` and no others, all required but `optional`."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def text(longest: int = 12, **more: Any) -> Schema:
    """A short string."""
    return {"type": "string", "maxLength": longest, **more}


def listed(items: Any, most: int = 3, **more: Any) -> Schema:
    """A short array."""
    return {"type": "array", "items": items, "maxItems": most, **more}


def tree(depth: int) -> Schema:
    """Nested objects, `depth` deep."""
    return record({"value": {"enum": [depth, "leaf"]}} | ({"child": tree(depth - 1)} if depth else {}))


SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
COLOUR = {"enum": ["red", "green", "blue"]}
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri")
PATTERNS = (
    "^[A-Z]{2}-[0-9]{4}$",
    "^(foo|bar|b[az]z)$",
    r"^\d{3}\.\d{2}$",
    "^[\u00e4\u00f6\u00fc]{1,4}$",
    r"^\+?[0-9]{1,3}( [0-9]{2}){2}$",
    "^a?b?c?$",
    '^[^aeiou"\\\\\\x00-\\x1f]{2,6}$',
    "^(\u65e5\u672c|\u4e2d\u56fd)\u8a9e?$",
)

SCALARS: tuple[Schema, ...] = (
    {"type": "boolean"},
    {"type": "null"},
    {"const": 42},
    {"const": "\u00e9\U0001f600"},
    {"const": {"a": [1, None, True]}},
    {"const": 'quote " back \\ slash / tab \t'},
    COLOUR,
    {"enum": [1, "1", None, True, 1.5, [1], {"a": 1}]},
    {"enum": ["\u00fc\u00f1\u00ef", "\u6f22\u5b57", "\U0001f680\U0001f30d", ""]},
    {"enum": [f"value-{number}" for number in range(300)]},
    SMALL,
    {"type": "integer", "minimum": -1000, "maximum": -1},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    {"type": "integer", "minimum": -(2**40), "maximum": 2**40},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "number", "minimum": -5, "maximum": 5, "multipleOf": 0.5},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": ["integer", "boolean"], "minimum": 3, "maximum": 3},
    text(0),
    text(20, minLength=5),
    text(4, minLength=4),
)

OBJECTS: tuple[Schema, ...] = (
    record({}),
    record({"a": SMALL}),
    record({"a": SMALL, "b": text()}, "b"),
    record({"a": SMALL, "b": SMALL, "c": SMALL}, "a", "b", "c"),
    record({"name": text(), "age": SMALL, "colour": COLOUR, "tags": listed(text(6))}),
    record({"\u00fcber": SMALL, "\u540d\u524d": text(6), "a b": COLOUR, 'quo"te': {"type": "null"}, "": SMALL}),
    record({f"property_{number}": SMALL for number in range(20)}),
    record({f"maybe_{number}": {"type": "boolean"} for number in range(12)}, *(f"maybe_{n}" for n in range(12))),
    record({"nested": record({"deeper": record({"deepest": COLOUR})})}),
    tree(5),
    record({"kind": {"const": "point"}, "x": SMALL, "y": SMALL}),
    record({"id": {"type": "string", "format": "uuid"}, "on": {"type": "string", "format": "date"}}),
    record({"matrix": listed(listed(SMALL, 3, minItems=3), 3, minItems=3)}),
    record(
        {
            "price": {"type": "number", "minimum": 0, "maximum": 99, "multipleOf": 0.25},
            "unit": {"enum": ["EUR", "\u20ac"]},
        }
    ),
    record(
        {"title": text(12, title="Title", description="d", default="x", examples=["y"])}, title="T", description="D"
    ),
)

ARRAYS: tuple[Schema, ...] = (
    listed(SMALL, 0),
    listed(SMALL, 5),
    listed(SMALL, 4, minItems=4),
    listed(text(5), 3, minItems=1),
    listed(COLOUR, 6),
    listed(listed(listed(SMALL, 2), 2), 2),
    listed(record({"k": text(4), "v": SMALL}), 3),
    listed({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, 4),
    {"type": "array", "prefixItems": [SMALL, COLOUR], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "head"}], "items": SMALL, "minItems": 2, "maxItems": 4},
    listed({"enum": ["\u00e9", "\U0001f600", "\\"]}, 5, minItems=2),
)

UNIONS: tuple[Schema, ...] = (
    {"anyOf": [SMALL, {"type": "null"}]},
    {"anyOf": [text(5), listed(SMALL), record({"a": COLOUR})]},
    {"anyOf": [record({"a": SMALL}), record({"b": SMALL}), record({"a": SMALL, "b": SMALL})]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [text(3), SMALL, {"type": "null"}]},
    {"oneOf": [record({"kind": {"const": "a"}, "x": SMALL}), record({"kind": {"const": "b"}, "y": COLOUR})]},
    {"oneOf": [{"const": "one"}, {"const": "two"}, {"enum": ["three", "four"]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [text(8), {"minLength": 4}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
            {"additionalProperties": False, "properties": {"a": True}},
        ]
    },
    {"anyOf": [{"anyOf": [{"const": 1}, {"const": "a"}]}, {"oneOf": [{"const": None}, {"const": False}]}]},
    record({"value": {"anyOf": [SMALL, text(4), {"type": "null"}]}}),
    listed({"oneOf": [SMALL, {"type": "string", "pattern": "^[a-z]{2}$"}]}, 4),
    {"type": ["array", "integer"], "items": COLOUR, "maxItems": 2, "minimum": 0, "maximum": 9},
)

RECURSIVE: tuple[Schema, ...] = (
    {
        "$defs": {"node": record({"value": SMALL, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    {
        "$defs": {"tree": record({"label": COLOUR, "children": listed({"$ref": "#/$defs/tree"}, 1)})},
        "$ref": "#/$defs/tree",
    },
    {
        "definitions": {"list": {"anyOf": [{"type": "null"}, listed({"$ref": "#/definitions/list"}, 1)]}},
        "$ref": "#/definitions/list",
    },
    {
        "$defs": {
            "expression": {"anyOf": [SMALL, {"$ref": "#/$defs/sum"}]},
            "sum": record({"left": SMALL, "right": {"$ref": "#/$defs/expression"}}),
        },
        "$ref": "#/$defs/expression",
    },
    {
        "$defs": {
            "even": {"anyOf": [{"const": "stop"}, listed({"$ref": "#/$defs/odd"}, 1, minItems=1)]},
            "odd": record({"then": {"$ref": "#/$defs/even"}}),
        },
        "$ref": "#/$defs/even",
    },
    {
        "$defs": {"a": COLOUR, "b": listed({"$ref": "#/$defs/a"}), "c": record({"b": {"$ref": "#/$defs/b"}})},
        **record({"c": {"$ref": "#/$defs/c"}}),
    },
    record({"self": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
)

MAPS: tuple[Schema, ...] = (
    {"type": "object", "additionalProperties": SMALL, "maxProperties": 0},
    record({"a": SMALL}) | {"additionalProperties": False, "required": []},
    {"type": "object", "patternProperties": {"^x_[a-c]$": SMALL}, "additionalProperties": False, "maxProperties": 3},
    {
        "type": "object",
        "properties": {"id": SMALL},
        "required": ["id"],
        "patternProperties": {"^[a-z]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
)

ALL: tuple[Schema, ...] = (
    *SCALARS,
    *({"type": "string", "pattern": pattern} for pattern in PATTERNS),
    *({"type": "string", "format": name} for name in FORMATS),
    *OBJECTS,
    *ARRAYS,
    *UNIONS,
    *RECURSIVE,
    *MAPS,
    *(record({"when": {"type": "string", "format": name}, "what": COLOUR}) for name in FORMATS[:5]),
    *(listed({"type": "string", "pattern": pattern}, 2, minItems=1) for pattern in PATTERNS[:4]),
)

# Of no greatest length: names in mail addresses, fractions of seconds, lists in lists. A model may go on for ever.
_ENDLESS_FORMATS = ("time", "date-time", "email", "hostname", "duration", "uri")


def bounded(schema: Schema) -> bool:
    """Whether every answer is short."""
    formats = (schema.get("format"), schema.get("properties", {}).get("when", {}).get("format"))
    return schema not in RECURSIVE and not any(name in _ENDLESS_FORMATS for name in formats)
