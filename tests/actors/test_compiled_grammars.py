"""Compiled once for all who ask, copied for each, few kept; whoever waits too long is told to come back."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from actors import compiled_grammars
from actors.compiled_grammars import COPIES, KEPT, CompiledGrammars
from actors.errors import ReplicaOverloaded, RequestRefused
from actors.grammar_source import matcher_of
from actors.request import Grammar

BYTES = LLTokenizer("byte")


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


class Compiler:
    """Counts what is compiled, and holds it up while `may_go_on` is cleared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

        def held(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
            self.compiled.append(grammar.text)
            assert self.may_go_on.wait(10)
            return matcher_of(tokenizer, grammar)

        monkeypatch.setattr(compiled_grammars, "matcher_of", held)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


@pytest.fixture
async def grammars(compiler: Compiler) -> AsyncIterator[CompiledGrammars]:
    made = CompiledGrammars(lambda: BYTES, wait_s=0.05)
    yield made
    compiler.may_go_on.set()
    made.close()


async def test_many_who_ask_at_once_get_copies_of_one(grammars: CompiledGrammars, compiler: Compiler) -> None:
    matchers = await asyncio.gather(*(grammars.matcher(regex("ab")) for _ in range(COPIES - 1)))
    assert compiler.compiled == ["ab"]
    assert matchers[0].consume_token(ord("a"))
    assert matchers[0].consume_token(ord("b"))
    assert matchers[0].is_accepting()
    assert not matchers[1].is_accepting()
    later = await grammars.matcher(regex("ab"))
    assert later.consume_token(ord("a"))
    assert compiler.compiled == ["ab"]


async def test_few_are_kept_and_the_latest_asked_for_stay(grammars: CompiledGrammars, compiler: Compiler) -> None:
    texts = [f"a{n}" for n in range(KEPT + 1)]
    for text in (*texts[:-1], texts[0], texts[-1], texts[0]):  # the second goes for the last
        await grammars.matcher(regex(text))
    assert compiler.compiled == texts
    await grammars.matcher(regex(texts[1]))
    assert compiler.compiled == [*texts, texts[1]]


async def test_who_leaves_takes_nothing_from_those_who_stay(grammars: CompiledGrammars, compiler: Compiler) -> None:
    compiler.may_go_on.clear()
    leaving, staying = (asyncio.create_task(grammars.matcher(regex("a"))) for _ in range(2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.sleep(0)
    compiler.may_go_on.set()
    assert (await staying).consume_token(ord("a"))
    assert compiler.compiled == ["a"]


async def test_what_waits_too_long_for_others_is_not_called_too_complex(
    grammars: CompiledGrammars, compiler: Compiler
) -> None:
    compiler.may_go_on.clear()
    first = asyncio.create_task(grammars.matcher(regex("a")))
    await asyncio.sleep(0.01)
    with pytest.raises(ReplicaOverloaded, match="waited"):
        await grammars.matcher(regex("b"))
    compiler.may_go_on.set()
    await first
    assert (await grammars.matcher(regex("b"))).consume_token(ord("b"))
    assert compiler.compiled == ["a", "b"]


async def test_too_many_different_ones_at_once_are_refused(
    grammars: CompiledGrammars, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_grammars, "MAX_COMPILING", 2)
    results = await asyncio.gather(
        *(grammars.matcher(regex(text)) for text in ("a", "b", "c", "a")), return_exceptions=True
    )
    assert [isinstance(result, ReplicaOverloaded) for result in results] == [False, False, True, False]
    assert compiler.compiled == ["a", "b"]


@pytest.mark.parametrize("error", [RequestRefused("no tokenizer"), ValueError("a bug"), BaseException("a panic")])
async def test_an_error_reaches_everybody_and_is_not_kept(error: BaseException) -> None:
    def tokenizer() -> LLTokenizer:
        raise error

    grammars = CompiledGrammars(tokenizer)
    for _ in range(2):
        results = await asyncio.gather(*(grammars.matcher(regex("a")) for _ in range(3)), return_exceptions=True)
        expected = ValueError if isinstance(error, ValueError) else RequestRefused
        assert [type(result) for result in results] == [expected] * 3
    grammars.close()


async def test_after_closing_nothing_is_compiled(grammars: CompiledGrammars) -> None:
    grammars.close()
    with pytest.raises(ReplicaOverloaded, match="stopping"):
        await asyncio.wait_for(grammars.matcher(regex("a")), 1)


async def test_copies_share_limits_so_there_are_only_so_many(grammars: CompiledGrammars, compiler: Compiler) -> None:
    asking = [grammars.matcher(regex("ab")) for _ in range(3 * COPIES)]
    assert len(await asyncio.gather(*asking)) == 3 * COPIES
    assert compiler.compiled == ["ab"] * 3


async def test_a_grammar_whose_automaton_grows_serves_as_many_requests_as_one_would_alone() -> None:
    """Each token of each request adds states to a lexer that all copies share."""
    grammars = CompiledGrammars(lambda: BYTES)
    rng = random.Random(1)
    for _ in range(80):
        matcher = await grammars.matcher(regex("(a|b)*a(a|b){18}"))
        for _ in range(450):
            assert matcher.consume_token(ord(rng.choice("ab"))), matcher.get_error()
            matcher.compute_bitmask()
    grammars.close()


async def test_what_nobody_waits_for_any_more_is_not_compiled(grammars: CompiledGrammars, compiler: Compiler) -> None:
    compiler.may_go_on.clear()
    first = asyncio.create_task(grammars.matcher(regex("first")))
    await asyncio.sleep(0.01)
    left = [asyncio.create_task(grammars.matcher(regex(f"left{n}"))) for n in range(5)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    last = asyncio.create_task(grammars.matcher(regex("last")))
    await asyncio.sleep(0.01)
    compiler.may_go_on.set()
    await asyncio.gather(first, last)
    assert compiler.compiled == ["first", "last"]


async def test_one_asked_for_again_after_everybody_left_is_compiled(
    grammars: CompiledGrammars, compiler: Compiler
) -> None:
    compiler.may_go_on.clear()
    leaving = asyncio.create_task(grammars.matcher(regex("a")))
    await asyncio.sleep(0.01)
    leaving.cancel()
    again = asyncio.create_task(grammars.matcher(regex("a")))
    await asyncio.sleep(0.01)
    compiler.may_go_on.set()
    assert (await again).consume_token(ord("a"))
