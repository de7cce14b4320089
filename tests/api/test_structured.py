"""What the fields for structured output become, which are refused and how, and the check before anything is scheduled."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from actors.errors import RequestRefused
from actors.grammar_source import MAX_GRAMMAR_BYTES
from actors.grammar_trial import GrammarTrial
from actors.request import Grammar
from cluster.api import structured
from cluster.api.errors import ApiError
from cluster.api.structured import MAX_GBNF_CHARS, GrammarChecker, check, grammar_of, param_of

BYTES = LLTokenizer("byte")
SCHEMA = {"type": "object", "properties": {"\u00e9": {"type": "integer"}}}
NAMED = {"name": "answer", "schema": SCHEMA}


class Codec:
    """A codec of bytes that counts how often it is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked = 0
        self._error = error

    def grammar_tokenizer(self) -> LLTokenizer:
        self.asked += 1
        if self._error is not None:
            raise self._error
        return BYTES


class ScriptedTrial(GrammarTrial):
    """Says what it is told to, and counts."""

    def __init__(self, verdict: str | Exception) -> None:
        super().__init__(BYTES)
        self.verdict = verdict
        self.tried = 0

    def problem(self, grammar: Grammar) -> str:
        self.tried += 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.fixture(scope="module")
def codec() -> Iterator[Codec]:
    codec = Codec()
    yield codec
    checker = structured._CHECKERS.get(codec)
    if checker is not None:
        checker.close()


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


async def test_a_good_grammar_passes_and_a_bad_one_is_a_400(codec: Codec) -> None:
    await check(Grammar("json_schema", json.dumps(SCHEMA)), codec)
    with pytest.raises(ApiError, match="nosuch") as caught:
        await check(Grammar("json_schema", '{"type": "nosuch"}'), codec, "tools.0.function.parameters")
    assert (caught.value.status, caught.value.param) == (400, "tools.0.function.parameters")
    with pytest.raises(ApiError, match="unclosed group") as caught:
        await check(Grammar("regex", "(("), codec)
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    assert codec.asked == 1


async def test_a_hostile_grammar_is_a_400_and_the_next_one_passes() -> None:
    hostile = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
    checker = GrammarChecker(lambda tokenizer: GrammarTrial(tokenizer, cpu_s=0.3))
    codec = Codec()
    results = await asyncio.gather(
        *(checker.check(grammar, codec, "guided_json") for grammar in (hostile, Grammar("regex", "after"))),
        return_exceptions=True,
    )
    checker.close()
    assert isinstance(results[0], ApiError)
    assert re.search("takes more than .* s to compile", results[0].message)
    assert results[1] is None


async def test_too_much_text_is_refused_without_asking_anybody() -> None:
    trial = ScriptedTrial("")
    checker = GrammarChecker(lambda tokenizer: trial)
    with pytest.raises(ApiError, match=str(MAX_GRAMMAR_BYTES)):
        await checker.check(Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), Codec(), "guided_regex")
    assert trial.tried == 0
    checker.close()


@pytest.fixture
async def checking() -> AsyncIterator[tuple[GrammarChecker, ScriptedTrial]]:
    trial = ScriptedTrial("")
    checker = GrammarChecker(lambda tokenizer: trial)
    yield checker, trial
    checker.close()


async def test_a_verdict_is_remembered(checking: tuple[GrammarChecker, ScriptedTrial]) -> None:
    checker, trial = checking
    codec = Codec()
    for _ in range(3):
        await checker.check(Grammar("regex", "a"), codec, "guided_regex")
    assert trial.tried == 1
    trial.verdict = "It is bad."
    for _ in range(3):
        with pytest.raises(ApiError, match="bad"):
            await checker.check(Grammar("lark", "a"), codec, "guided_grammar")
    assert trial.tried == 2


async def test_only_so_many_verdicts_are_remembered(
    checking: tuple[GrammarChecker, ScriptedTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, trial = checking
    monkeypatch.setattr(structured, "KNOWN_GRAMMARS", 2)
    codec = Codec()
    for text in ("a", "b", "a", "c", "a", "b"):  # b is forgotten for c
        await checker.check(Grammar("regex", text), codec, "guided_regex")
    assert trial.tried == 4


async def test_a_machine_too_busy_to_try_is_a_503_that_is_not_remembered(
    checking: tuple[GrammarChecker, ScriptedTrial],
) -> None:
    checker, trial = checking
    trial.verdict = TimeoutError("too busy")
    with pytest.raises(ApiError) as caught:
        await checker.check(Grammar("regex", "a"), Codec(), "guided_regex")
    assert caught.value.status == 503
    assert "retry-after" in caught.value.headers
    trial.verdict = ""
    await checker.check(Grammar("regex", "a"), Codec(), "guided_regex")


async def test_too_many_at_once_is_a_503(
    checking: tuple[GrammarChecker, ScriptedTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, _ = checking
    monkeypatch.setattr(structured, "MAX_WAITING", 2)
    codec = Codec()
    results = await asyncio.gather(
        *(checker.check(Grammar("regex", "a" * n), codec, "guided_regex") for n in range(5)), return_exceptions=True
    )
    statuses = [result.status for result in results if isinstance(result, ApiError)]
    assert statuses == [503] * 3
    await checker.check(Grammar("regex", "later"), codec, "guided_regex")


async def test_a_tokenizer_that_cannot_be_used_is_a_400() -> None:
    checker = GrammarChecker()
    codec = Codec(RequestRefused("This model's tokenizer cannot be used with a grammar.", "response_format"))
    with pytest.raises(ApiError, match="tokenizer") as caught:
        await checker.check(Grammar("regex", "a"), codec, "guided_regex")
    assert (caught.value.status, caught.value.param) == (400, "guided_regex")
    checker.close()


async def test_the_process_ends_with_the_codec() -> None:
    codec = Codec()
    await check(Grammar("regex", "a"), codec)
    checker = structured._CHECKERS[codec]
    assert checker._trial is not None
    pid = checker._trial.pid
    assert pid is not None
    os.kill(pid, 0)  # it is there
    del codec
    for _ in range(1000):  # the thread that checked may be the last to let go of the codec, and then ends the process
        gc.collect()
        if not _exists(pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the process lives on")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
