"""The check of grammars before anything is scheduled: verdicts, their memory, whose turn it is, and who leaves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import httpx
import pytest
from llguidance import LLTokenizer

from actors.errors import RequestRefused
from actors.grammar_source import MAX_GRAMMAR_BYTES
from actors.grammar_trial import GrammarTrial, Verdict
from actors.request import Grammar
from cluster.api import app as application
from cluster.api import grammar_check
from cluster.api.app import ApiSettings, build_app
from cluster.api.errors import ApiError
from cluster.api.grammar_check import COSTLY, GrammarCheck
from cluster.api.identity import ANONYMOUS, Identity
from tests.api.asgi_call import AsgiCall, eventually
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

BYTES = LLTokenizer("byte")
ALICE, BOB = Identity("alice"), Identity("bob")


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
    """Says what it is told to, when it may, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(BYTES)
        self.verdict_now: Verdict | Exception = Verdict()
        self.tried: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def verdict(self, grammar: Grammar) -> Verdict:
        self.tried.append(grammar.text)
        assert self.may_go_on.wait(10)
        if isinstance(self.verdict_now, Exception):
            raise self.verdict_now
        return self.verdict_now


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


@pytest.fixture
def trial() -> ScriptedTrial:
    return ScriptedTrial()


@pytest.fixture
async def check(trial: ScriptedTrial) -> AsyncIterator[GrammarCheck]:
    made = GrammarCheck(Codec(), lambda tokenizer: trial)
    yield made
    trial.may_go_on.set()
    await made.close()


@pytest.fixture
async def real() -> AsyncIterator[GrammarCheck]:
    made = GrammarCheck(Codec())
    yield made
    await made.close()


async def begin(check: GrammarCheck, text: str, identity: Identity = ALICE) -> asyncio.Task[None]:
    """A check that has come to wait for its verdict."""
    task = asyncio.create_task(check.check(regex(text), identity=identity))
    await asyncio.sleep(0)
    return task


async def until_tried(trial: ScriptedTrial, count: int) -> None:
    async with asyncio.timeout(10):
        while len(trial.tried) < count:  # noqa: ASYNC110 - it is a thread that counts
            await asyncio.sleep(0.001)


async def test_a_good_grammar_passes_and_a_bad_one_is_a_400(real: GrammarCheck) -> None:
    await real.check(Grammar("json_schema", json.dumps({"type": "object"})))
    with pytest.raises(ApiError, match="nosuch") as caught:
        await real.check(Grammar("json_schema", '{"type": "nosuch"}'), "tools.0.function.parameters")
    assert (caught.value.status, caught.value.param) == (400, "tools.0.function.parameters")
    assert caught.value.code is None
    with pytest.raises(ApiError, match="unclosed group") as caught:
        await real.check(regex("(("))
    assert (caught.value.status, caught.value.param) == (400, "response_format")


async def test_a_hostile_grammar_is_a_400_and_the_next_one_passes() -> None:
    hostile = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
    check = GrammarCheck(Codec(), lambda tokenizer: GrammarTrial(tokenizer, cpu_s=0.3))
    results = await asyncio.gather(
        *(check.check(grammar, "guided_json") for grammar in (hostile, regex("after"))), return_exceptions=True
    )
    await check.close()
    assert isinstance(results[0], ApiError)
    assert re.search("takes more than .* s to compile", results[0].message)
    assert results[0].code == COSTLY
    assert results[1] is None


async def test_too_much_text_is_refused_without_asking_anybody(check: GrammarCheck, trial: ScriptedTrial) -> None:
    with pytest.raises(ApiError, match=str(MAX_GRAMMAR_BYTES)):
        await check.check(regex("a" * (MAX_GRAMMAR_BYTES + 1)))
    assert trial.tried == []


async def test_a_verdict_is_remembered(check: GrammarCheck, trial: ScriptedTrial) -> None:
    for _ in range(3):
        await check.check(regex("a"))
    assert trial.tried == ["a"]
    trial.verdict_now = Verdict("It is bad.")
    for _ in range(3):
        with pytest.raises(ApiError, match="bad"):
            await check.check(regex("b"))
    assert trial.tried == ["a", "b"]


async def test_only_so_many_verdicts_are_remembered(
    check: GrammarCheck, trial: ScriptedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "KNOWN_GRAMMARS", 2)
    for text in ("a", "b", "a", "c", "a", "b"):  # b is forgotten for c
        await check.check(regex(text))
    assert trial.tried == ["a", "b", "c", "b"]


async def test_many_who_ask_for_the_same_at_once_wait_for_one_trial(check: GrammarCheck, trial: ScriptedTrial) -> None:
    asking = [check.check(regex("a"), identity=identity) for identity in (ALICE, BOB) for _ in range(100)]
    assert await asyncio.gather(*asking) == [None] * 200
    assert trial.tried == ["a"]


async def test_a_machine_too_busy_to_try_is_a_503_that_is_not_remembered(
    check: GrammarCheck, trial: ScriptedTrial
) -> None:
    trial.verdict_now = TimeoutError("too busy")
    with pytest.raises(ApiError) as caught:
        await check.check(regex("a"))
    assert caught.value.status == 503
    assert "retry-after" in caught.value.headers
    trial.verdict_now = Verdict()
    await check.check(regex("a"))


async def test_too_many_at_once_is_a_503(
    check: GrammarCheck, trial: ScriptedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 2)
    trial.may_go_on.clear()
    tasks = [await begin(check, "a" * n) for n in range(1, 6)]  # one is tried, two wait
    again = [await begin(check, "aa"), await begin(check, "aa", BOB)]  # no more than one of them
    trial.may_go_on.set()
    results = await asyncio.gather(*tasks, *again, return_exceptions=True)
    assert [getattr(result, "status", None) for result in results] == [None] * 3 + [503] * 2 + [None] * 2
    await check.check(regex("later"))


async def test_one_key_has_its_share_of_the_line(
    check: GrammarCheck, trial: ScriptedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING_OF_KEY", 2)
    trial.may_go_on.clear()
    tasks = [await begin(check, "a" * n) for n in range(1, 5)]  # one is tried, two wait
    other = await begin(check, "b", BOB)
    nobody = [await begin(check, f"c{n}", ANONYMOUS) for n in range(5)]  # no key, so no share of one
    trial.may_go_on.set()
    results = await asyncio.gather(*tasks, other, *nobody, return_exceptions=True)
    assert [getattr(result, "status", None) for result in results] == [None] * 3 + [429] + [None] * 6


async def test_clients_take_turns(check: GrammarCheck, trial: ScriptedTrial) -> None:
    trial.may_go_on.clear()
    tasks = [await begin(check, f"a{n}") for n in range(4)]
    tasks += [await begin(check, f"b{n}", BOB) for n in range(2)]
    trial.may_go_on.set()
    await asyncio.gather(*tasks)
    assert trial.tried == ["a0", "b0", "a1", "b1", "a2", "a3"]


async def test_who_had_no_turn_yet_is_next(check: GrammarCheck, trial: ScriptedTrial) -> None:
    for text in ("a", "b"):
        await check.check(regex(text), identity=ALICE if text == "a" else BOB)
    trial.may_go_on.clear()
    tasks = [await begin(check, text, BOB) for text in ("b0", "b1", "b2")]
    tasks += [await begin(check, "a0"), await begin(check, "new", Identity("carol"))]
    trial.may_go_on.set()
    await asyncio.gather(*tasks)
    assert trial.tried == ["a", "b", "b0", "new", "a0", "b1", "b2"]


async def test_a_key_that_waits_for_nothing_gets_a_place_in_a_full_line(
    check: GrammarCheck, trial: ScriptedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 2)
    trial.may_go_on.clear()
    tasks = [await begin(check, text) for text in ("a0", "a1", "a2")]
    other = [await begin(check, text, BOB) for text in ("b0", "b1")]
    trial.may_go_on.set()
    results = await asyncio.gather(*tasks, *other, return_exceptions=True)
    assert [getattr(result, "status", None) for result in results] == [None] * 4 + [503]


async def test_what_two_ask_for_comes_at_the_turn_of_whoever_is_first(
    check: GrammarCheck, trial: ScriptedTrial
) -> None:
    trial.may_go_on.clear()
    tasks = [await begin(check, text) for text in ("a0", "a1", "a2", "common")]
    tasks += [await begin(check, "common", BOB), await begin(check, "b", BOB)]
    trial.may_go_on.set()
    await asyncio.gather(*tasks)
    assert trial.tried == ["a0", "common", "a1", "b", "a2"]


async def test_who_leaves_takes_his_out_of_the_line_and_nobody_elses(check: GrammarCheck, trial: ScriptedTrial) -> None:
    trial.may_go_on.clear()
    tasks = [await begin(check, text) for text in ("now", "left", "common")]
    others = [await begin(check, "common", BOB), await begin(check, "common", BOB)]
    await until_tried(trial, 1)
    for task in tasks:
        task.cancel()
    others.pop().cancel()
    await asyncio.sleep(0)
    trial.may_go_on.set()
    await asyncio.gather(*others)
    assert trial.tried == ["now", "common"]
    await check.check(regex("now"))  # was tried to its end
    assert trial.tried == ["now", "common"]
    assert (check._jobs, check._lines) == ({}, {})


async def test_an_error_that_nobody_waits_for_any_more_is_no_bodys(check: GrammarCheck, trial: ScriptedTrial) -> None:
    """Warnings are errors: an exception that is never retrieved would fail this."""
    trial.may_go_on.clear()
    trial.verdict_now = OSError("no child")
    task = await begin(check, "a")
    await until_tried(trial, 1)
    task.cancel()
    trial.may_go_on.set()
    with pytest.raises(ApiError):
        await check.check(regex("b"))


async def test_a_tokenizer_that_cannot_be_used_is_a_400() -> None:
    refusal = RequestRefused("This model's tokenizer cannot be used with a grammar.", "response_format")
    check = GrammarCheck(Codec(refusal))
    with pytest.raises(ApiError, match="tokenizer") as caught:
        await check.check(regex("a"), "guided_regex")
    assert (caught.value.status, caught.value.param) == (400, "guided_regex")
    await check.close()


async def test_closing_ends_the_process_also_one_that_is_at_work() -> None:
    check = GrammarCheck(Codec())
    await check.check(regex("a"))
    assert check._trial is not None
    pid = check._trial.pid
    assert pid is not None
    os.kill(pid, 0)  # it is there
    hostile = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
    task = asyncio.create_task(check.check(hostile))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(1.5):  # less than the grammar may take
        await check.close()
    with pytest.raises(ApiError) as caught:
        await task
    assert caught.value.status == 503
    await check.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SLOW = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "slow"}}}}


@pytest.fixture
def held(trial: ScriptedTrial, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedTrial]:
    """What applications made from now on try grammars with; it waits."""
    monkeypatch.setattr(application, "GrammarCheck", lambda codec: GrammarCheck(Codec(), lambda tokenizer: trial))
    trial.may_go_on.clear()
    yield trial
    trial.may_go_on.set()


async def test_a_client_that_leaves_does_not_wait_for_its_grammar(
    held: ScriptedTrial, settings: ApiSettings, engine: FakeEngine, codec: ByteCodec
) -> None:
    call = AsgiCall(build_app(settings, engine, codec), CHAT, chat_body(**SLOW))
    await eventually(lambda: held.tried)
    call.disconnect()
    await asyncio.wait_for(call.task, 1)
    assert call.sent == []
    held.may_go_on.set()
    await asyncio.sleep(0.05)
    assert engine.requests == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_deadline_holds_while_a_grammar_is_checked(
    held: ScriptedTrial, settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, path: str
) -> None:
    app = build_app(replace(settings, request_timeout_s=0.05), engine, codec)
    body = chat_body(**SLOW) if path == CHAT else completion_body(**SLOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert error_of(await client.post(path, json=body), 504)["code"] == "deadline_exceeded"
    held.may_go_on.set()
    await asyncio.sleep(0.05)
    assert engine.requests == []


@pytest.mark.parametrize(("verdict", "tried"), [(Verdict("Too dear.", costly=True), 1), (Verdict("Wrong."), 2)])
async def test_tools_are_looked_into_one_by_one_only_where_that_is_cheap(
    held: ScriptedTrial, settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, verdict: Verdict, tried: int
) -> None:
    held.verdict_now = verdict
    held.may_go_on.set()
    settings, codec.chat_template = replace(settings, max_model_len=4000), "{{ tools }}<tool_call>"
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"const": n}}} for n in range(5)]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_app(settings, engine, codec)), base_url="http://test"
    ) as client:
        error = error_of(await client.post(CHAT, json=chat_body(tools=tools, tool_choice="required")), 400)
    assert error["param"] == ("tools" if verdict.costly else "tools.0.function.parameters")
    assert error["code"] == (COSTLY if verdict.costly else None)
    assert len(held.tried) == tried


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_end_that_must_not_come_and_a_grammar_that_ends_contradict(
    client: httpx.AsyncClient, path: str
) -> None:
    fields = {"guided_regex": "a+", "ignore_eos": True}
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    assert error_of(await client.post(path, json=body), 400)["param"] == "ignore_eos"
