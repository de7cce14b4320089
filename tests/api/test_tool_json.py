from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.tool_json import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=5)
PIECES = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        '"a"',
        '"a":',
        "1",
        "-",
        "0",
        ".",
        "e",
        "1e5",
        "true",
        "nul",
        "null",
        " ",
        "\n",
        "\\u00",
        "x",
    ]
)


def refuse(word: str) -> Any:
    raise ValueError(word)


def is_object(text: str) -> bool:
    """The oracle: Python's own parser, without the constants that are not JSON."""
    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict) and text[0] == "{" and text[-1] == "}"
    except ValueError:
        return False


@settings(max_examples=60, deadline=None)
@given(
    OBJECTS, st.booleans(), st.sampled_from([None, 0, 2]), st.text(max_size=5), st.lists(st.integers(1, 9), max_size=9)
)
def test_an_object_ends_where_it_ends_however_it_is_cut(
    value: dict[str, Any], ascii_only: bool, indent: int | None, after: str, steps: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner, at = JsonScanner(), 0
    whole = text + after
    while not scanner.done:
        at = scanner.feed(whole[: at + steps.pop()] if steps else whole, at)
        assert not scanner.failed
    assert at == len(text)
    found = [(json.loads(text[slice(*one.key)]), json.loads(text[slice(*one.value)])) for one in scanner.members]
    assert dict(found) == value
    assert [text[slice(*one.value)] for one in scanner.members] == [
        text[slice(*one.value)].strip() for one in scanner.members
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_it_accepts_what_a_full_parser_accepts(inner: str) -> None:
    text = "{" + inner
    scanner = JsonScanner()
    end = scanner.feed(text)
    assert not (scanner.done and scanner.failed)
    assert scanner.done == any(is_object(text[:size]) for size in range(1, len(text) + 1))
    if scanner.done:
        assert is_object(text[:end])
    if scanner.failed:
        assert end < len(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        " {",
        "{,",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        '{"a":01}',
        '{"a":+1}',
        '{"a":1.}',
        '{"a":NaN}',
        '{"a":tru}',
        '{"a":"\n"}',
        '{"a":"\\x"}',
        '{"a":"\\u12g4"}',
        '{"a":[1,]}',
        '{"a":[}',
        '{"a":{]',
        "{'a':1}",
        '{"a":1 2}',
        '{"a" 1}',
        "{1:2}",
    ],
)
def test_what_is_no_json_is_never_done(text: str) -> None:
    scanner = JsonScanner()
    scanner.feed(text)
    assert not scanner.done
    assert scanner.failed == bool(text)


def test_depth_costs_no_recursion() -> None:
    scanner = JsonScanner()
    text = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
    assert scanner.feed(text) == len(text)
    assert scanner.done
