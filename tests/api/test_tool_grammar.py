"""Grammars are judged by what llguidance lets through: texts that must pass, texts that must not, and texts drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.request import Grammar
from cluster.api.errors import ApiError
from cluster.api.tool_fields import ToolFunction
from cluster.api.tool_format import GENERIC, HERMES, LLAMA3, MISTRAL, ToolFormat
from cluster.api.tool_grammar import ToolGrammar, arguments_schema
from cluster.api.tool_reader import CallArguments, CallStart, ToolReader

SPECIAL = ("<eos>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>")
CITY = ToolFunction(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"enum": ["°C", "°F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    strict=True,
)
SUM = ToolFunction(
    name="sum-up_2",
    parameters={
        "properties": {
            "of": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
        },
        "required": ["of"],
        "additionalProperties": False,
    },
)
BARE = ToolFunction(name="now")
FUNCTIONS = [CITY, SUM, BARE]
LAYOUTS = pytest.mark.parametrize("layout", [HERMES, GENERIC, LLAMA3, MISTRAL])


@cache
def byte_tokenizer(special: bool) -> LLTokenizer:
    """One token per byte, and `SPECIAL` as special tokens or, all but the first, not at all."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL[: None if special else 1]])
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<eos>"))


def token_ids(special: bool) -> dict[str, int]:
    return {text: 256 + at for at, text in enumerate(SPECIAL)} if special else {}


def tool_grammar(
    layout: ToolFormat, several: bool = True, special: bool = False, *functions: ToolFunction
) -> ToolGrammar:
    return ToolGrammar(layout, functions or FUNCTIONS, several, token_ids(special))


def matcher(grammar: Grammar, special: bool = False) -> LLMatcher:
    assert grammar.kind == "lark"
    one = LLMatcher(byte_tokenizer(special), LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert one.get_error() == ""
    return one


def allows(grammar: Grammar, text: str, special: bool = False) -> bool:
    """Whether `text` may be the whole answer."""
    one = matcher(grammar, special)
    tokens = byte_tokenizer(special).tokenize_str(text, parse_special=True)
    return one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()


def drawn(grammar: Grammar, seed: int, special: bool = False) -> str:
    """An answer at random: any byte that may come, the end as soon as it may come, half of the time."""
    rng = random.Random(seed)
    one, tokens, tokenizer = matcher(grammar, special), list[int](), byte_tokenizer(special)
    while not one.is_stopped():
        allowed = [token for token, bias in enumerate(one.compute_logit_bias()) if bias]
        if tokenizer.eos_token in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            break
        tokens.append(rng.choice([token for token in allowed if token != tokenizer.eos_token]))
        assert one.consume_token(tokens[-1]), one.get_error()
        assert len(tokens) < 4000
    return "".join(pieces(tokens, tokenizer))


def pieces(tokens: list[int], tokenizer: LLTokenizer) -> Iterator[str]:
    """As a stream that keeps special tokens has it."""
    plain: list[int] = []
    for token in [*tokens, -1]:
        if 0 <= token < 256:
            plain.append(token)
            continue
        yield tokenizer.decode_bytes(plain).decode("utf-8", "replace")
        plain = []
        if token >= 0:
            yield SPECIAL[token - 256]


def calls_in(layout: ToolFormat, text: str) -> tuple[list[tuple[str, Any]], str]:
    ids = count()
    reader = ToolReader(layout, frozenset(one.name for one in FUNCTIONS), lambda: str(next(ids)))
    parts = reader.push(text) + reader.finish()
    names = [part.name for part in parts if isinstance(part, CallStart)]
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    content = "".join(part.text for part in parts if not isinstance(part, CallStart | CallArguments))
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)], content


def check_calls(calls: list[tuple[str, Any]]) -> None:
    by_name = {one.name: one for one in FUNCTIONS}
    for name, arguments in calls:
        jsonschema.validate(arguments, arguments_schema(by_name[name]))


def call(layout: ToolFormat, name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "{layout.arguments_key}": {arguments}}}'


def answer(layout: ToolFormat, *objects: str) -> str:
    if layout.array:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects) if layout.closing else "".join(objects)


@LAYOUTS
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_whatever_a_forced_grammar_lets_through_is_calls_that_fit(
    layout: ToolFormat, special: bool, several: bool
) -> None:
    grammar = tool_grammar(layout, several, special).forced()
    seen: set[str] = set()
    most = 0
    for seed in range(12):
        calls, content = calls_in(layout, drawn(grammar, seed, special))
        assert calls
        assert content == ""
        check_calls(calls)
        seen |= {name for name, _ in calls}
        most = max(most, len(calls))
    assert len(seen) > 1
    assert (most > 1) == (several and layout.several)


@LAYOUTS
def test_a_forced_grammar_takes_calls_and_nothing_else(layout: ToolFormat) -> None:
    grammar = tool_grammar(layout).forced()
    city = call(layout, "get_weather", '{"city": "Köln", "unit": "°C"}')
    now = call(layout, "now", "{}")
    assert allows(grammar, answer(layout, city))
    assert allows(grammar, answer(layout, now, city)) == layout.several
    for wrong in (
        "",
        "hello",
        answer(layout, city)[:-1],
        "Well: " + answer(layout, city),
        answer(layout, call(layout, "get_weather", '{"city": "Köln"}')),
        answer(layout, call(layout, "get_weather", '{"city": "toolong", "unit": "°C"}')),
        answer(layout, call(layout, "now", '{"extra": 1}')),
        answer(layout, call(layout, "nobody", "{}")),
    ):
        assert not allows(grammar, wrong), wrong


@pytest.mark.parametrize("layout", [HERMES, MISTRAL])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_triggered_text_is_free_until_a_call_begins(layout: ToolFormat, special: bool, several: bool) -> None:
    grammar = tool_grammar(layout, several, special).triggered()
    city = answer(layout, call(layout, "get_weather", '{"city": "Köln", "unit": "°C"}'))
    bad = answer(layout, call(layout, "get_weather", '{"city": "Köln", "unit": "K"}'))
    for free in ("", "hello {\n", "a < b", "<tool_cal", "[TOOL", '[{"name": "x"}]'):
        assert allows(grammar, free, special), free
        assert allows(grammar, free + city, special), free
        assert not allows(grammar, free + bad, special), free
    assert not allows(grammar, layout.opening + "hello", special)
    assert allows(grammar, city + city, special) == (several and not layout.array)
    assert allows(grammar, f"{city}\nDone.", special) == (several and not layout.array)


def test_a_tag_that_is_a_special_token_binds_when_it_is_spelled_as_well() -> None:
    grammar = tool_grammar(MISTRAL, True, True).triggered()
    one = matcher(grammar, special=True)
    spelled = [byte_tokenizer(True).tokenize_str(letter)[0] for letter in "[TOOL_CALLS]hello"]
    assert one.try_consume_tokens(spelled) == len("[TOOL_CALLS]")


def test_triggered_text_without_tags_is_a_call_if_it_begins_as_one() -> None:
    grammar = tool_grammar(LLAMA3).triggered()
    assert allows(grammar, call(LLAMA3, "now", "{}"))
    for free in ("", " ", "hello", "see {this}", "\n[1]"):
        assert allows(grammar, free), free
    for wrong in ("{", ' {"a": 1}', call(LLAMA3, "nobody", "{}"), call(LLAMA3, "now", "{}") + " and more"):
        assert not allows(grammar, wrong), wrong


@LAYOUTS
@pytest.mark.parametrize(
    ("content", "fits", "fails"),
    [
        (
            Grammar("json_schema", '{"type": "object", "properties": {"z": {"type": "integer"}}}'),
            '{"z": 1, "y": null}',
            '{"z":1}',
        ),
        (Grammar("json_schema", '{"enum": ["a/b", "é"]}'), '"é"', "é"),
        (Grammar("regex", r"a/b\d+\n?"), "a/b17\n", "a/b"),
        (Grammar("lark", 'start: word\nword: "yes" | "no"'), "no", "maybe"),
    ],
)
def test_mixed_answers_are_content_of_its_own_grammar_or_calls(
    layout: ToolFormat, content: Grammar, fits: str, fails: str
) -> None:
    grammar = tool_grammar(layout).mixed(content)
    city = answer(layout, call(layout, "get_weather", '{"city": "Köln", "unit": "°C"}'))
    assert allows(grammar, fits)
    assert allows(grammar, city)
    for wrong in (fails, fits + city, "hello"):
        assert not allows(grammar, wrong), wrong


def test_a_schema_that_cannot_be_held_whole_is_an_error_only_if_strict() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "nosuch"}, "b": {"not": {}}}}
    parameters["properties"]["c"] = {"oneOf": [{"type": "string"}, {"maxLength": 3}]}  # type: ignore[index]
    for strict in (True, False, None):
        function = ToolFunction(name="f", parameters=parameters, strict=strict)
        grammar = tool_grammar(HERMES, True, False, function).forced()
        one = LLMatcher(byte_tokenizer(False), LLMatcher.grammar_from_lark(grammar.text), log_level=0)
        assert bool(one.get_error()) == bool(strict)


def test_a_schema_may_say_itself_how_it_is_read() -> None:
    compact = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "x-guidance": {"key_separator": ":"},
    }
    grammar = tool_grammar(LLAMA3, True, False, ToolFunction(name="f", parameters=compact)).forced()
    assert allows(grammar, '{"name": "f", "parameters": {"a":1}}')
    assert not allows(grammar, '{"name": "f", "parameters": {"a": 1}}')


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"]}}},
        {"anyOf": [{"properties": {"n": {"const": 1}}, "required": ["n"]}]},
        {
            "type": ["object", "null"],
            "properties": {"n": {"const": 1}},
            "required": ["n"],
            "additionalProperties": False,
        },
    ],
)
def test_arguments_are_an_object_whatever_the_schema_says(parameters: dict[str, Any]) -> None:
    grammar = tool_grammar(LLAMA3, True, False, ToolFunction(name="f", parameters=parameters)).forced()
    assert allows(grammar, '{"name": "f", "parameters": {"n": 1}}')
    for wrong in ("null", "1", "[]", "{}", '{"n": 2}'):
        assert not allows(grammar, f'{{"name": "f", "parameters": {wrong}}}'), wrong


def test_content_that_nests_too_deep_is_refused() -> None:
    deep = Grammar("json_schema", '{"not": ' * 50_000 + "{}" + "}" * 50_000)
    with pytest.raises(ApiError) as caught:
        tool_grammar(HERMES).mixed(deep)
    assert (caught.value.status, caught.value.param) == (400, "response_format")
