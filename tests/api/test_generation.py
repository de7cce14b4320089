"""The flow that both routes share: several choices, what they count, keep-alive comments, deadlines, and admission."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from actors.request import GenerateRequest
from cluster.api.admission import AdmissionLimits
from cluster.api.app import ApiSettings, build_app
from cluster.api.edge import Edge
from cluster.api.grammar_check import GrammarCheck
from cluster.api.identity import Identity
from cluster.api.plan import Caller, plan
from cluster.api.schemas import ChatRequest
from tests.api.asgi_call import AsgiCall, eventually
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.api.sse_oracle import read_stream
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine, Script

PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
MODES = pytest.mark.parametrize("stream", [False, True])
USAGE = {"include_usage": True}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return chat_body(**fields) if path == CHAT else completion_body(**fields)


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def by_choice(request: GenerateRequest) -> Script:
    return Script.of(f"<{request.choice}>", "!").but(cached_tokens=request.choice % 2)


@PATHS
async def test_n_choices(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    engine.script = by_choice
    reply = (await client.post(path, json=body_for(path, n=3, seed=7))).json()
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in reply["choices"]]
    assert texts == ["<0>!", "<1>!", "<2>!"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len({request.request_id for request in engine.requests}) == 3
    assert {request.sampling.seed for request in engine.requests} == {7}
    assert len({request.prompt_token_ids for request in engine.requests}) == 1
    prompt_tokens = len(engine.requests[0].prompt_token_ids)
    assert reply["usage"]["prompt_tokens"] == prompt_tokens, "a prompt counts once"
    assert reply["usage"]["completion_tokens"] == 6
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    body = body_for(path, n=3, seed=7, stream=True, stream_options=USAGE)
    streamed = await client.post(path, json=body)
    transcript = read_stream(streamed.content, chat=path == CHAT, choices=3, include_usage=True)
    assert transcript.texts == dict(enumerate(texts))
    assert transcript.usage == reply["usage"]


async def test_n_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.script = by_choice
    reply = (await client.post(COMPLETIONS, json=completion_body(prompt=["a", "bb"], n=2, best_of=2))).json()
    assert [request.prompt_token_ids for request in engine.requests] == [(97,), (97,), (98, 98), (98, 98)]
    assert [choice["text"] for choice in reply["choices"]] == ["<0>!", "<1>!", "<2>!", "<3>!"]
    assert reply["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(("prompts", "n", "served"), [(2, 128, True), (3, 86, False), (256, 1, True), (129, 2, False)])
async def test_one_request_has_at_most_256_choices(
    client: httpx.AsyncClient, engine: FakeEngine, prompts: int, n: int, served: bool
) -> None:
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["x"] * prompts, n=n))
    if served:
        assert len(response.json()["choices"]) == prompts * n
    else:
        assert error_of(response, 400)["param"] == "n"
        assert engine.requests == []


@PATHS
@pytest.mark.parametrize("include", [False, True])
async def test_usage_so_far_in_every_chunk(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, include: bool
) -> None:
    options = {"include_usage": include, "continuous_usage_stats": True}
    response = await client.post(path, json=body_for(path, n=2, stream=True, stream_options=options))
    transcript = read_stream(response.content, chat=path == CHAT, choices=2, include_usage=include, usage_always=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in transcript.chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in transcript.chunks} == {
        len(engine.requests[0].prompt_token_ids)
    }


@PATHS
@MODES
async def test_token_ids_on_request(client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool) -> None:
    engine.script = Script(deltas=(("", (226, 130)), ("€", (172,)), ("x", (120,)), ("", (121,))))
    response = await client.post(path, json=body_for(path, n=2, stream=stream, return_token_ids=True))
    prompt = list(engine.requests[0].prompt_token_ids)
    ids = [226, 130, 172, 120, 121]
    if stream:
        transcript = read_stream(response.content, chat=path == CHAT, choices=2)
        assert transcript.token_ids == {0: ids, 1: ids}
        assert transcript.prompt_token_ids == ({0: prompt} if path == CHAT else {0: prompt, 1: prompt})
        assert transcript.texts == {0: "€x", 1: "€x"}
        return
    reply = response.json()
    assert [choice["token_ids"] for choice in reply["choices"]] == [ids, ids]
    told = [reply["prompt_token_ids"]] if path == CHAT else [each["prompt_token_ids"] for each in reply["choices"]]
    assert told == [prompt] * len(told)


@pytest.mark.parametrize("prompt", ["añb", [97, 0xC3, 0xB1, 98], ["añb"], [[97, 0xC3, 0xB1, 98]]])
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_comes_before_the_answer(client: httpx.AsyncClient, prompt: Any, n: int) -> None:
    body = completion_body(prompt=prompt, echo=True, n=n)
    whole = (await client.post(COMPLETIONS, json=body)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["añbHello world"] * n
    assert whole["usage"]["completion_tokens"] == 2 * n
    streamed = await client.post(COMPLETIONS, json=body | {"stream": True})
    assert read_stream(streamed.content, chat=False, choices=n).texts == dict.fromkeys(range(n), "añbHello world")


# Keep-alive


@PATHS
async def test_silence_is_filled_with_comments_that_change_nothing(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, path: str
) -> None:
    engine.script = Script(delay_s=0.2, admit_delay_s=0.2)
    async with client_of(build_app(replace(settings, keep_alive_s=0.01), engine, codec)) as client:
        response = await client.post(path, json=body_for(path, n=2, stream=True))
    transcript = read_stream(response.content, chat=path == CHAT, choices=2)
    assert transcript.comments >= 2
    assert transcript.texts == {0: "Hello world", 1: "Hello world"}
    assert len(engine.closed) == 2


async def test_no_comment_before_the_status(settings: ApiSettings, engine: FakeEngine, codec: ByteCodec) -> None:
    engine.script = Script(admit_delay_s=60)
    call = AsgiCall(build_app(replace(settings, keep_alive_s=0.01), engine, codec), CHAT, chat_body(stream=True))
    await eventually(lambda: engine.open_streams == 1)
    await asyncio.sleep(0.1)
    assert call.sent == []
    call.disconnect()
    await call.task


async def test_no_comments_where_they_are_off(settings: ApiSettings, engine: FakeEngine, codec: ByteCodec) -> None:
    engine.script = Script(delay_s=0.05)
    async with client_of(build_app(replace(settings, keep_alive_s=0.0), engine, codec)) as client:
        response = await client.post(CHAT, json=chat_body(stream=True))
    assert read_stream(response.content, chat=True).comments == 0


async def test_a_client_that_leaves_during_the_silence(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec
) -> None:
    engine.script = Script(delay_s=60)
    call = AsgiCall(build_app(replace(settings, keep_alive_s=0.01), engine, codec), CHAT, chat_body(stream=True))
    await eventually(lambda: b": keep-alive\n\n: keep-alive\n\n" in call.body)
    call.disconnect()
    await asyncio.wait_for(call.task, 1)
    assert engine.open_streams == 0


# Deadline


@PATHS
@MODES
async def test_a_deadline_before_the_status_is_504(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, path: str, stream: bool
) -> None:
    engine.script = Script(admit_delay_s=60)
    async with client_of(build_app(replace(settings, request_timeout_s=0.05), engine, codec)) as client:
        response = await asyncio.wait_for(client.post(path, json=body_for(path, n=2, stream=stream)), 2)
    error = error_of(response, 504)
    assert error["code"] == "deadline_exceeded"
    assert "0.05 s" in error["message"]
    assert engine.open_streams == 0
    assert engine.finished == []


async def test_a_deadline_while_a_whole_reply_is_collected_is_504(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec
) -> None:
    engine.script = Script(endless=True, delay_s=0.005)
    async with client_of(build_app(replace(settings, request_timeout_s=0.05), engine, codec)) as client:
        response = await asyncio.wait_for(client.post(CHAT, json=chat_body()), 2)
    assert error_of(response, 504)["code"] == "deadline_exceeded"
    assert engine.open_streams == 0


@PATHS
async def test_a_deadline_in_a_stream_is_an_event(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, path: str
) -> None:
    engine.script = Script(endless=True, delay_s=0.005)
    async with client_of(build_app(replace(settings, request_timeout_s=0.1), engine, codec)) as client:
        response = await asyncio.wait_for(client.post(path, json=body_for(path, stream=True)), 2)
    transcript = read_stream(response.content, chat=path == CHAT)
    assert transcript.error is not None
    assert transcript.error["code"] == "deadline_exceeded"
    assert transcript.texts[0].startswith("Hello world")
    assert engine.open_streams == 0


async def test_a_deadline_frees_the_blocks_of_a_client_that_reads_nothing(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec
) -> None:
    engine.script = Script(endless=True)
    app = build_app(replace(settings, request_timeout_s=0.2), engine, codec)
    call = AsgiCall(app, CHAT, chat_body(stream=True))
    await eventually(lambda: len(call.sent) > 10)
    call.reading.clear()
    await eventually(lambda: engine.open_streams == 0)
    call.reading.set()
    await asyncio.wait_for(call.task, 1)
    assert call.body.endswith(b"data: [DONE]\n\n")
    assert b"deadline_exceeded" in call.body


async def test_a_timeout_of_somebody_else_is_no_deadline(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec
) -> None:
    engine.script = Script(refusal=TimeoutError("elsewhere"))
    async with client_of(build_app(replace(settings, request_timeout_s=30), engine, codec)) as client:
        error_of(await client.post(CHAT, json=chat_body()), 500)


# Admission


async def test_who_waits_is_let_in_once_the_one_before_is_admitted(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec
) -> None:
    engine.script = Script(admit_delay_s=0.05, delay_s=0.05)
    app = build_app(replace(settings, admission=AdmissionLimits(inflight_tokens=1)), engine, codec)
    async with client_of(app) as client:
        calls = [asyncio.create_task(client.post(CHAT, json=chat_body(stream=True))) for _ in range(3)]
        await eventually(lambda: engine.requests)
        assert len(engine.requests) == 1, "the others wait for their turn"
        replies = await asyncio.gather(*calls)
    assert all(read_stream(reply.content, chat=True).texts == {0: "Hello world"} for reply in replies)
    assert len(engine.requests) == 3


@MODES
async def test_a_deadline_counts_the_wait_for_admission(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, stream: bool
) -> None:
    engine.script = Script(admit_delay_s=60)
    limits = AdmissionLimits(inflight_tokens=1)
    app = build_app(replace(settings, admission=limits, request_timeout_s=0.1), engine, codec)
    async with client_of(app) as client:
        replies = await asyncio.gather(*(client.post(CHAT, json=chat_body(stream=stream)) for _ in range(2)))
        assert [error_of(reply, 504)["code"] for reply in replies] == ["deadline_exceeded"] * 2
        engine.script = Script()
        assert (await client.post(CHAT, json=chat_body())).status_code == 200, "no place was lost"


async def test_a_full_queue_is_refused_with_a_status(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec
) -> None:
    engine.script = Script(admit_delay_s=0.05)
    app = build_app(replace(settings, admission=AdmissionLimits(queue_tokens=1)), engine, codec)
    async with client_of(app) as client:
        replies = await asyncio.gather(*(client.post(CHAT, json=chat_body(stream=True)) for _ in range(3)))
    refused = [reply for reply in replies if reply.status_code != 200]
    assert [error_of(reply, 503)["code"] for reply in refused] == ["server_is_overloaded"] * 2


async def test_a_request_counts_with_all_it_may_come_to() -> None:
    edge = _edge()
    fields = ChatRequest.model_validate(chat_body(n=3, max_tokens=10))
    planned = plan(edge, fields, [[1, 2, 3]], param="messages", default_max_tokens=None, caller=Caller())
    assert planned.tokens == 3 * (3 + 10)


# Salts


def _edge(settings: ApiSettings | None = None) -> Edge:
    def one() -> int:
        return 1

    settings, codec = settings or ApiSettings("org/tiny", 128), ByteCodec()
    return Edge(settings, FakeEngine(), codec, lambda: "id", lambda: 1.0, one, GrammarCheck(codec))


def test_the_salts_of_key_and_request_are_joined_so_that_no_two_pairs_are_the_same() -> None:
    salts = ["", "a", "b", "ab", "a:b", "1:a", " "]
    joined = set()
    for own in salts:
        for given in salts:
            fields = ChatRequest.model_validate(chat_body(cache_salt=given or None))
            caller = Caller(Identity("someone", own))
            planned = plan(_edge(), fields, [[1]], param="messages", default_max_tokens=None, caller=caller)
            joined.add(planned.requests[0].salt)
    assert len(joined) == len(salts) ** 2


@PATHS
@MODES
async def test_nothing_tells_of_the_caches_where_that_is_off(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, path: str, stream: bool
) -> None:
    engine.script = Script(cached_tokens=1, route="policy=cost")
    options = {"stream_options": USAGE} if stream else {}
    async with client_of(build_app(replace(settings, debug_headers=False), engine, codec)) as client:
        response = await client.post(path, json=body_for(path, stream=stream, **options))
    assert not [name for name in response.headers if name.startswith("x-kvatlas-")]
    assert b"cached_tokens" not in response.content
    assert b'"total_tokens"' in response.content


WAYS_OUT: list[tuple[str, Callable[[AsgiCall], Any]]] = [
    ("leaves", lambda call: call.disconnect()),
    ("cancelled", lambda call: call.task.cancel()),
]


@pytest.mark.parametrize(("_name", "leave"), WAYS_OUT)
async def test_who_leaves_the_queue_gives_back_its_place(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, _name: str, leave: Callable[[AsgiCall], Any]
) -> None:
    engine.script = Script(admit_delay_s=60)
    app = build_app(replace(settings, admission=AdmissionLimits(inflight_tokens=1)), engine, codec)
    first, second = (AsgiCall(app, CHAT, chat_body()) for _ in range(2))
    await eventually(lambda: engine.open_streams == 1)
    for call in (second, first):
        leave(call)
        await asyncio.wait({call.task}, timeout=1)
        assert call.task.done()
    engine.script = Script()
    async with client_of(app) as client:
        assert (await asyncio.wait_for(client.post(CHAT, json=chat_body()), 1)).status_code == 200
