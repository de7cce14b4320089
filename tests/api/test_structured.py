"""What the fields for structured output become, which are refused and how, and the check before anything is scheduled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from actors.request import Grammar
from cluster.api.errors import ApiError
from cluster.api.structured import MAX_GBNF_CHARS, grammar_of, param_of

BYTES = LLTokenizer("byte")
SCHEMA = {"type": "object", "properties": {"\u00e9": {"type": "integer"}}}
NAMED = {"name": "answer", "schema": SCHEMA}


def matches(grammar: Grammar, text: str) -> bool:
    """Whether the grammar takes exactly `text`."""
    source = grammar.text if grammar.kind == "lark" else LLMatcher.grammar_from_regex(grammar.text)
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None, "guided_choice": None},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None}},
    ],
)
def test_a_free_answer(body: dict[str, Any]) -> None:
    assert grammar_of(body) is None
    assert param_of(body) == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": None, "description": "d"}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json"),
    ],
)
def test_a_schema_in_all_its_spellings(body: dict[str, Any], param: str) -> None:
    grammar = grammar_of(body)
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text) == SCHEMA
    assert param_of(body) == param


@pytest.mark.parametrize(
    "body", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True, "json": None}}]
)
def test_any_object(body: dict[str, Any]) -> None:
    assert grammar_of(body) == Grammar("json_schema", '{"type": "object"}')


@pytest.mark.parametrize("body", [{"structured_outputs": {"regex": "a|b"}}, {"guided_regex": "a|b"}])
def test_a_regular_expression(body: dict[str, Any]) -> None:
    assert grammar_of(body) == Grammar("regex", "a|b")


@pytest.mark.parametrize("text", ['start: "a" | B\nB: /b+/\n', 'root ::= "a" | b\nb ::= "b" b | "b"\n'])
@pytest.mark.parametrize(
    "wrap", [lambda text: {"structured_outputs": {"grammar": text}}, lambda text: {"guided_grammar": text}]
)
def test_a_grammar_in_either_syntax(text: str, wrap: Any) -> None:
    grammar = grammar_of(wrap(text))
    assert grammar is not None
    assert grammar.kind == "lark"
    assert [matches(grammar, answer) for answer in ("a", "bbb", "ab", "")] == [True, True, False, False]


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.text(max_size=12))
def test_a_choice_is_exact(texts: list[str], other: str) -> None:
    grammar = grammar_of({"structured_outputs": {"choice": texts}})
    assert grammar == grammar_of({"guided_choice": texts})
    assert grammar is not None
    assert all(matches(grammar, text) for text in texts)
    assert matches(grammar, other) == (other in texts)


@pytest.mark.parametrize(
    "text", ['"', "\\", "/", "\n", "\x00", "\x7f", "%json {}", "<|end|>", "a|b", "\u00e9\U0001f600", " "]
)
def test_a_choice_of_text_that_means_something_in_grammars(text: str) -> None:
    grammar = grammar_of({"structured_outputs": {"choice": [text, "other"]}})
    assert grammar is not None
    assert matches(grammar, text)
    assert not matches(grammar, text + "x")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": []}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"name": "no spaces"}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"name": "a" * 65}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": 1}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"description": 1}}},
            "response_format.json_schema.description",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": {"minimum": float("inf")}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": None, "json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "3"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice.1"),
        ({"structured_outputs": {"grammar": {}}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= nosuch"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"grammar": "root ::= " + "(" * 4000 + '"a"' + ")" * 4000}},
            "structured_outputs.grammar",
        ),
        ({"structured_outputs": {"grammar": "root ::= " + '"a" ' * MAX_GBNF_CHARS}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": {}}, "guided_choice"),
        ({"guided_grammar": 1}, "guided_grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_malformed_fields_are_refused_with_their_path(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.split(".")[0] in caught.value.message
    assert len(caught.value.message) < 500
    assert json.dumps(caught.value.envelope(), allow_nan=False).isascii()


FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
KEYS = st.sampled_from(
    ["type", "json_schema", "name", "schema", "strict", "json", "regex", "choice", "grammar", "json_object"]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(["json_schema"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_whatever_is_given_is_a_grammar_or_an_error_with_a_path(body: dict[str, Any]) -> None:
    try:
        grammar = grammar_of(body)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017
        assert error.param  # noqa: PT017
    else:
        assert (grammar is None) == (param_of(body) == "")
