"""Grammars at a replica: what may come, when it ends, what is refused, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import weakref
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from actors.errors import ReplicaOverloaded, RequestRefused
from actors.grammar import ACCEPT_RESERVE_S, ACCEPT_S, MASK_S, GrammarConstraint, Grammars
from actors.grammar_source import MAX_GRAMMAR_BYTES
from actors.request import Grammar
from tests.fakes.tiny_checkpoint import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)
EOS = int(TOKENIZER.eos_token_id)


class Bell:
    """What `on_ready` rings, and a constraint's reader waits for."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.rung = asyncio.Event()
        self.rings = 0

    def ring(self) -> None:
        self.loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self.rings += 1
        self.rung.set()

    async def ready(self, constraint: GrammarConstraint) -> None:
        while not constraint.ready:
            self.rung.clear()
            if not constraint.ready:
                await self.rung.wait()


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    opened = Grammars(TOKENIZER, VOCAB, (EOS,))
    yield opened
    opened.close()


def allowed(constraint: GrammarConstraint, vocab: int = VOCAB) -> set[int]:
    logits = torch.zeros(vocab)
    constraint.apply(logits)
    return set(torch.isfinite(logits).nonzero().flatten().tolist())


def byte(text: str) -> int:
    [token] = TOKENIZER.encode(text)
    return int(token)


async def write(grammars: Grammars, grammar: Grammar, choose: Callable[[list[int]], int], longest: int = 400) -> str:
    """The answer of somebody who takes what `choose` says among what is allowed."""
    bell = Bell()
    constraint = await grammars.open(grammar, bell.ring)
    tokens: list[int] = []
    while not constraint.done and len(tokens) < longest:
        assert constraint.failure == ""
        token = choose(sorted(allowed(constraint)))
        tokens.append(token)
        constraint.accept(token)
        await bell.ready(constraint)
    assert constraint.done, f"no end: {TOKENIZER.decode(tokens)}"
    constraint.close()
    return str(TOKENIZER.decode([token for token in tokens if token != EOS]))


async def test_only_what_the_grammar_allows_may_come(grammars: Grammars) -> None:
    bell = Bell()
    constraint = await grammars.open(Grammar("regex", "ab?"), bell.ring)
    assert (constraint.ready, constraint.done) == (True, False)
    assert allowed(constraint) == {byte("a")}
    constraint.accept(byte("a"))
    await bell.ready(constraint)
    assert bell.rings == 1
    assert allowed(constraint) == {byte("b"), EOS}
    constraint.accept(EOS)
    assert (constraint.ready, constraint.done, constraint.failure) == (True, True, "")
    constraint.close()
    constraint.close()


async def test_an_answer_that_can_only_end_is_complete(grammars: Grammars) -> None:
    bell = Bell()
    constraint = await grammars.open(Grammar("regex", "ab"), bell.ring)
    for letter in "ab":
        assert not constraint.done
        constraint.accept(byte(letter))
        await bell.ready(constraint)
    assert constraint.done
    assert constraint.failure == ""


async def test_a_grammar_of_the_empty_text_is_complete_at_once(grammars: Grammars) -> None:
    constraint = await grammars.open(Grammar("regex", ""), lambda: None)
    assert constraint.ready
    assert constraint.done


async def test_a_token_that_was_not_allowed_is_a_failure(grammars: Grammars) -> None:
    bell = Bell()
    constraint = await grammars.open(Grammar("regex", "ab"), bell.ring)
    constraint.accept(byte("z"))
    await bell.ready(constraint)
    assert constraint.failure != ""
    constraint.accept(byte("a"))  # which nobody should
    assert constraint.failure != ""


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        (Grammar("json_schema", '{"type": "nosuch"}'), "nosuch"),
        (Grammar("json_schema", "{"), "not valid"),
        (Grammar("json_schema", "[1]"), "not valid"),
        (Grammar("json_schema", '{"$ref": "http://example.com/x.json"}'), "does not fetch"),
        (Grammar("json_schema", '{"allOf": [{"type": "string"}, {"type": "null"}]}'), "nsatisfiable"),
        (Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "coerce_one_of"),
        (Grammar("regex", "(("), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", r"[^\x00-\x{10ffff}]"), "No text"),
        (Grammar("lark", "begin: A"), "start"),
        (Grammar("lark", "start: <|nosuch|>"), "nosuch"),
        (Grammar("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), str(MAX_GRAMMAR_BYTES)),
        (Grammar("regex", "\u00e9" * (MAX_GRAMMAR_BYTES // 2 + 1)), str(MAX_GRAMMAR_BYTES)),
    ],
)
async def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason(
    grammars: Grammars, grammar: Grammar, part: str
) -> None:
    with pytest.raises(RequestRefused) as caught:
        await grammars.open(grammar, lambda: None)
    assert part in caught.value.message
    assert caught.value.param == "response_format"
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert "Tokens:" not in caught.value.message


@pytest.mark.parametrize("seed", range(5))
async def test_random_choices_make_valid_json(grammars: Grammars, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "tags": {"type": "array", "items": {"enum": ["\u00e4", "b\"'", 3]}, "maxItems": 3},
            "n": {"type": "integer", "minimum": -5, "maximum": 1200},
        },
        "required": ["name", "tags", "n"],
        "additionalProperties": False,
    }
    text = await write(grammars, Grammar("json_schema", json.dumps(schema)), random.Random(seed).choice)
    value = json.loads(text)
    assert set(value) == {"name", "tags", "n"}
    assert all(tag in ("\u00e4", "b\"'", 3) for tag in value["tags"])
    assert -5 <= value["n"] <= 1200


async def test_json_has_the_white_space_of_the_json_module(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = await write(grammars, Grammar("json_schema", json.dumps(schema)), lambda ids: ids[0])
    assert text == '{"a": [1, 2]}'


async def test_a_character_of_several_tokens_comes_whole(grammars: Grammars) -> None:
    grammar = Grammar("lark", 'start: "\U0001f600" | "\u00e9"')
    assert {await write(grammars, grammar, random.Random(seed).choice) for seed in range(8)} == {"\U0001f600", "\u00e9"}


async def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    """Though their letters are allowed one by one, a free text must not hold the token that starts a turn."""
    constraint = await grammars.open(Grammar("regex", "(.|\n)*"), lambda: None)
    special = set(TOKENIZER.all_special_ids) - {EOS}
    assert special
    assert allowed(constraint) & special == set()
    assert EOS in allowed(constraint)


async def test_logits_may_be_wider_than_the_tokenizer(grammars: Grammars) -> None:
    wide = Grammars(TOKENIZER, VOCAB + 100, (EOS, VOCAB + 5, VOCAB + 200, -1))
    constraint = await wide.open(Grammar("regex", "a*"), lambda: None)
    assert allowed(constraint, VOCAB + 100) == {byte("a"), EOS, VOCAB + 5}
    constraint.accept(VOCAB + 5)
    assert constraint.done
    wide.close()


async def test_logits_may_be_narrower_than_the_tokenizer() -> None:
    narrow = Grammars(TOKENIZER, VOCAB - 1, (EOS,))
    constraint = await narrow.open(Grammar("regex", "a*"), lambda: None)
    assert allowed(constraint, VOCAB - 1) == {byte("a"), EOS}
    narrow.close()


async def test_a_model_without_an_end_is_refused() -> None:
    endless = Grammars(TOKENIZER, VOCAB, (VOCAB + 7,))
    with pytest.raises(RequestRefused, match="no token that ends"):
        await endless.open(Grammar("regex", "a"), lambda: None)
    endless.close()


async def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    slow = Grammars(object(), VOCAB, (EOS,))
    with pytest.raises(RequestRefused, match="no fast tokenizer"):
        await slow.open(Grammar("regex", "a"), lambda: None)
    slow.close()


async def test_a_compilation_that_takes_too_long_is_given_up() -> None:
    hurried = Grammars(TOKENIZER, VOCAB, (EOS,), compile_s=0.0)
    with pytest.raises(RequestRefused, match="more than 0 s"):
        await hurried.open(Grammar("json_schema", '{"type": "integer", "multipleOf": 9973}'), lambda: None)
    hurried.close()


async def test_nothing_is_opened_after_closing(grammars: Grammars) -> None:
    constraint = await grammars.open(Grammar("regex", "a+"), lambda: None)
    grammars.close()
    grammars.close()
    constraint.close()
    with pytest.raises(ReplicaOverloaded):
        await grammars.open(Grammar("regex", "a"), lambda: None)


async def test_closing_while_a_mask_is_made_rings_nobody(grammars: Grammars) -> None:
    bell = Bell()
    constraint = await grammars.open(Grammar("regex", "a+"), bell.ring)
    constraint.close()
    constraint.accept(byte("a"))
    await grammars.open(Grammar("regex", "a+"), bell.ring)
    await asyncio.sleep(0)
    assert bell.rings == 0


async def test_the_memory_goes_with_the_sequence(grammars: Grammars) -> None:
    bell = Bell()
    constraint = await grammars.open(Grammar("regex", "a+"), bell.ring)
    gone = weakref.ref(constraint)
    constraint.close()
    other = await grammars.open(Grammar("regex", "a+"), bell.ring)  # after the worker's turn at the first
    other.accept(byte("a"))
    await bell.ready(other)
    del constraint
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("grammar", "prefix"),
    [
        (Grammar("lark", 'start: s\ns: s s s | s s | A |\nA: "a"'), "a" * 400),
        (Grammar("lark", 'start: x{1,3000}\nx: y{1,3000}\ny: "a" | "b"'), "ab" * 200),
        (Grammar("regex", "(((a|b){1,100}c?){1,100}d?){1,100}"), "abc" * 100),
    ],
)
async def test_a_grammar_that_explodes_ends_with_a_reason(grammars: Grammars, grammar: Grammar, prefix: str) -> None:
    """Whichever limit it meets first: in llguidance, or of ours."""
    bell = Bell()
    constraint = await grammars.open(grammar, bell.ring)
    for letter in prefix:
        if constraint.failure or byte(letter) not in allowed(constraint):
            break
        constraint.accept(byte(letter))
        await bell.ready(constraint)
    assert constraint.failure != ""


class Clock:
    """Of CPU time, read before and after each piece of work; the pieces take `accept_s` and `mask_s` in turn."""

    def __init__(self, accept_s: float, mask_s: float) -> None:
        self._ends = itertools.cycle((0.0, mask_s, 0.0, accept_s))

    def __call__(self) -> float:
        return next(self._ends)


@pytest.mark.parametrize(
    ("accept_s", "mask_s", "tokens", "part"),
    [
        (ACCEPT_S, MASK_S, 300, ""),
        (ACCEPT_S + ACCEPT_RESERVE_S / 100, MASK_S, 100, "ambiguous"),
        (ACCEPT_RESERVE_S * 1.1, MASK_S, 1, "ambiguous"),
    ],
)
async def test_a_sequence_may_spend_so_much_time_and_no_more(
    grammars: Grammars, accept_s: float, mask_s: float, tokens: int, part: str
) -> None:
    opened = await grammars.open(Grammar("regex", "a+"), lambda: None)
    matcher, worker = opened._matcher, opened._worker
    assert matcher is not None
    bell = Bell()
    constraint = GrammarConstraint(matcher, VOCAB, frozenset({EOS}), worker, bell.ring, Clock(accept_s, mask_s))
    constraint.begin()
    count = 0
    while not constraint.failure and count < 300:
        constraint.accept(byte("a"))
        await bell.ready(constraint)
        count += 1
    assert abs(count - tokens) <= 1  # sums of binary fractions
    assert part in constraint.failure
    assert bool(part) == bool(constraint.failure)


async def test_a_mask_that_takes_too_long_ends_its_request(grammars: Grammars) -> None:
    opened = await grammars.open(Grammar("regex", "a+"), lambda: None)
    assert opened._matcher is not None
    slow = Clock(0.0, MASK_S * 1.1)
    constraint = GrammarConstraint(opened._matcher, VOCAB, frozenset({EOS}), opened._worker, lambda: None, slow)
    constraint.begin()
    assert "complex" in constraint.failure
