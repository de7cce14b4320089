"""Bugs that other servers shipped, each as its whole kind. Names carry the number of the report in our catalogue."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from actors.errors import ReplicaFailed, ReplicaOverloaded
from actors.request import GenerateRequest
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.api.conftest import CONTEXT
from tests.api.sse_oracle import read_stream
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import READY, FakeEngine, Script

PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
MODES = pytest.mark.parametrize("stream", [False, True])


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return chat_body(**fields) if path == CHAT else completion_body(**fields)


async def still_serves(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script()
    assert (await client.post(COMPLETIONS, json=completion_body())).json()["choices"][0]["text"] == "Hello world"


@PATHS
async def test_c4_characters_arrive_whole_in_both_modes(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    text = '한국 漢字 🙂👩‍👩‍👧 é\u2028\x00\x1b"\\'
    engine.script = Script.of(*text)
    streamed = await client.post(path, json=body_for(path, stream=True, max_tokens=100))
    assert read_stream(streamed.content, chat=path == CHAT).texts == {0: text}
    choice = (await client.post(path, json=body_for(path, max_tokens=100))).json()["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == text


@PATHS
@pytest.mark.parametrize("wanted", [True, False, None])
async def test_c7_c8_usage_chunk_has_no_choices_and_comes_when_asked_for(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, wanted: bool | None
) -> None:
    engine.script = Script(cached_tokens=1)
    body = body_for(path, stream=True, stream_options={"include_usage": wanted})
    response = await client.post(path, json=body)
    transcript = read_stream(response.content, chat=path == CHAT, include_usage=bool(wanted))
    if wanted:
        prompt_tokens = len(engine.requests[0].prompt_token_ids)
        assert transcript.usage == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 2,
            "total_tokens": prompt_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@PATHS
async def test_c10_no_seed_is_a_new_seed_each_time(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    for _ in range(3):
        await client.post(path, json=body_for(path))
    for _ in range(2):
        await client.post(path, json=body_for(path, seed=0))
    seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == [0, 0]


async def test_c10_choices_of_one_request_differ(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(COMPLETIONS, json=completion_body(prompt=["same", "same"]))
    await client.post(COMPLETIONS, json=completion_body(n=2, seed=5))
    draws = [(request.sampling.seed, request.choice) for request in engine.requests]
    assert len(set(draws)) == 4


async def test_c10_a_seed_gives_a_prompt_the_same_whatever_is_beside_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(COMPLETIONS, json=completion_body(prompt=["a", "b"], n=2, seed=5))
    await client.post(COMPLETIONS, json=completion_body(prompt="b", n=2, seed=5))
    draws = [(request.prompt_token_ids, request.sampling.seed, request.choice) for request in engine.requests]
    assert draws[2:4] == draws[4:6]
    assert len({request.request_id for request in engine.requests}) == 6


@MODES
@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
async def test_c11_empty_prompt(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, stream: bool) -> None:
    error_of(await client.post(COMPLETIONS, json=completion_body(prompt=prompt, stream=stream)), 400)
    assert engine.requests == []
    await still_serves(client, engine)


@MODES
@pytest.mark.parametrize("prompt", [[999999], [257], [-1], [[1], [2, 257]], [2**63], [True]])
async def test_c13_token_ids_outside_the_vocabulary(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, stream: bool
) -> None:
    error = error_of(await client.post(COMPLETIONS, json=completion_body(prompt=prompt, stream=stream)), 400)
    assert error["param"] == "prompt"
    assert engine.requests == []
    await still_serves(client, engine)


@PATHS
@pytest.mark.parametrize(
    "bias", [{"191222": -100}, {"257": 1}, {"-1": 1}, {"x": 1}, {"1.5": 1}, {"01": 1}, {"9" * 5000: 1}, [1], "x"]
)
async def test_c14_logit_bias_outside_the_vocabulary_never_reaches_the_replica(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, bias: Any
) -> None:
    error = error_of(await client.post(path, json=body_for(path, logit_bias=bias)), 400)
    assert error["param"] == "logit_bias"
    assert engine.requests == []
    await still_serves(client, engine)


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BAD_FORMATS: list[Any] = [
    {"type": "nosuch"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {}},
    {"type": "json_schema", "json_schema": {"name": "x"}},
    {},
    "text",
    5,
    _schema("x"),
    _schema({"type": "nosuch"}),
    _schema({"type": "string", "pattern": "("}),
    _schema({"$ref": "#/$defs/missing"}),
]


@PATHS
@MODES
@pytest.mark.parametrize("form", BAD_FORMATS)
async def test_c16_bad_response_formats_are_refused_before_scheduling(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool, form: Any
) -> None:
    response = await client.post(path, json=body_for(path, response_format=form, stream=stream))
    assert error_of(response, 400)["param"].split(".")[0] == "response_format"
    assert engine.requests == []


@PATHS
@pytest.mark.parametrize(
    "outputs", [{"regex": "("}, {"choice": []}, {"grammar": "start: ("}, {"json": {"type": "nosuch"}}, {}, {"x": 1}, 5]
)
async def test_c16_bad_structured_outputs_are_refused_before_scheduling(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, outputs: Any
) -> None:
    error = error_of(await client.post(path, json=body_for(path, structured_outputs=outputs)), 400)
    assert error["param"].split(".")[0] == "structured_outputs"
    assert engine.requests == []


@PATHS
@MODES
@pytest.mark.parametrize("max_tokens", [CONTEXT, 2**31 - 1, 2**31, 2**63, 10**18, 10**400])
async def test_c17_huge_max_tokens_is_clamped_to_the_context(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool, max_tokens: int
) -> None:
    response = await client.post(path, json=body_for(path, max_tokens=max_tokens, min_tokens=9, stream=stream))
    assert response.status_code == 200
    request = engine.requests[0]
    assert request.sampling.max_tokens + len(request.prompt_token_ids) == CONTEXT


async def test_c17_min_tokens_follows_the_clamp(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(COMPLETIONS, json=completion_body(prompt="x" * 120, max_tokens=10**9, min_tokens=10**8))
    assert engine.requests[0].sampling.max_tokens == engine.requests[0].sampling.min_tokens == 8


@MODES
@pytest.mark.parametrize("prompt", ["x" * CONTEXT, "x" * 50_000, [1] * CONTEXT, ["a", "x" * 200], [[1], [1] * 200]])
async def test_c18_c19_prompt_over_the_context(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, stream: bool
) -> None:
    response = await client.post(COMPLETIONS, json=completion_body(prompt=prompt, max_tokens=5, stream=stream))
    error = error_of(response, 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    longest = prompt if not isinstance(prompt[0], list) and isinstance(prompt, str) else max(prompt, key=_length)
    tokens = len(prompt) if isinstance(prompt, str) or isinstance(prompt[0], int) else len(longest)
    assert str(CONTEXT) in error["message"]
    assert str(tokens) in error["message"]
    assert engine.requests == []


def _length(item: Any) -> int:
    return 1 if isinstance(item, int) else len(item)


@MODES
async def test_c18_c19_conversation_over_the_context(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    messages = [{"role": "user", "content": "x" * 200}]
    error = error_of(await client.post(CHAT, json=chat_body(messages=messages, stream=stream)), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert engine.requests == []


async def test_c18_the_longest_prompt_that_fits_fits(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(COMPLETIONS, json=completion_body(prompt="x" * (CONTEXT - 1)))
    assert response.status_code == 200
    assert engine.requests[0].sampling.max_tokens == 1


@PATHS
async def test_c21_n_of_zero_is_an_error_and_the_connection_ends(
    wire: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    response = await asyncio.wait_for(wire.post(path, json=body_for(path, n=0, stream=True)), 2)
    assert error_of(response, 400)["param"] == "n"


@PATHS
@pytest.mark.parametrize("fail_after", [0, 1, 2])
@pytest.mark.parametrize("failure", [ReplicaFailed("x"), RuntimeError("x"), OSError("x"), TimeoutError()])
async def test_c21_an_error_in_the_stream_is_followed_by_done_and_close(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fail_after: int, failure: Exception
) -> None:
    engine.script = Script(fail_after=fail_after, failure=failure, finish_reason=None)
    response = await asyncio.wait_for(client.post(path, json=body_for(path, stream=True)), 2)
    transcript = read_stream(response.content, chat=path == CHAT)
    assert transcript.error is not None
    assert transcript.texts.get(0, "") == ("", "Hello", "Hello world")[fail_after]
    assert transcript.finish == {}


@pytest.mark.parametrize("stalled_s", [0.001, 30.0])
async def test_c23_health_is_not_ok_while_a_replica_hangs(
    client: httpx.AsyncClient, engine: FakeEngine, stalled_s: float
) -> None:
    for statuses in ([replace(READY, stalled_s=stalled_s)], [], [READY, replace(READY, integrity="lost block")]):
        engine.statuses = statuses
        for path in ("/health", "/health/ready"):
            error_of(await client.get(path), 503)
    engine.statuses = [READY]
    assert (await client.get("/health")).status_code == 200


@PATHS
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
async def test_c25_numbers_that_json_does_not_have(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, text: str, field: str
) -> None:
    content = json.dumps(body_for(path, **{field: 12345})).replace("12345", text)
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == field
    assert engine.requests == []


async def test_c26_the_turn_after_an_aborted_one_is_untouched(wire: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of("old").but(endless=True, delay_s=0.002)
    with pytest.raises(httpx.ReadTimeout):
        await wire.post(CHAT, json=chat_body(), timeout=0.1)
    engine.script = Script.of("new")
    replies = await asyncio.gather(*(wire.post(CHAT, json=chat_body(stream=True)) for _ in range(10)))
    assert all(read_stream(reply.content, chat=True).texts == {0: "new"} for reply in replies)


@MODES
async def test_c27_a_flood_gets_503_with_retry_after(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    def limited(request: GenerateRequest) -> Script:
        full = engine.open_streams > 5
        return Script(refusal=ReplicaOverloaded("5 waiting")) if full else Script(delay_s=0.02)

    engine.script = limited
    replies = await asyncio.gather(*(client.post(CHAT, json=chat_body(stream=stream)) for _ in range(30)))
    refused = [reply for reply in replies if reply.status_code != 200]
    assert len(refused) == 25
    for reply in refused:
        assert error_of(reply, 503)["code"] == "server_is_overloaded"
    await still_serves(client, engine)


async def test_c27_unknown_model_and_messages_as_object_are_in_the_envelope(client: httpx.AsyncClient) -> None:
    assert error_of(await client.post(CHAT, json=chat_body(model="gpt-5")), 404)["code"] == "model_not_found"
    error = error_of(await client.post(CHAT, json=chat_body(messages={"role": "user"})), 400)
    assert error["param"] == "messages"


@PATHS
@pytest.mark.parametrize("fields", [{"stop": ""}, {"stop": [""]}, {"stop": ["a", ""]}])
async def test_empty_stop_string(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    assert error_of(await client.post(path, json=body_for(path, **fields)), 400)["param"].split(".")[0] == "stop"


@PATHS
async def test_null_character_is_text(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    fields = {"prompt": "a\x00b"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a\x00b"}]}
    assert (await client.post(path, json=body_for(path, **fields, user="\x00", stop="\x00"))).status_code == 200
    assert 0 in engine.requests[0].prompt_token_ids


@PATHS
async def test_long_text_is_tokenized_off_the_loop(client: httpx.AsyncClient, path: str) -> None:
    """Long enough for the thread; what comes back is the same error as for short text."""
    text = "x" * 50_000
    fields = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    assert error_of(await client.post(path, json=body_for(path, **fields)), 400)["code"] == "context_length_exceeded"


async def test_many_empty_messages_do_not_block_the_loop(client: httpx.AsyncClient) -> None:
    messages = [{"role": "assistant"}] * 3000
    response = await client.post(CHAT, json=chat_body(messages=messages))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    path: str, client: httpx.AsyncClient, codec: ByteCodec
) -> None:
    text = "a " * 40_000
    body = (
        completion_body(prompt=text) if path == COMPLETIONS else chat_body(messages=[{"role": "user", "content": text}])
    )
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "80000 characters" in response.json()["error"]["message"]
    assert codec.conversations == []


async def test_half_a_surrogate_in_a_part_type_is_a_400(client: httpx.AsyncClient) -> None:
    body = chat_body(messages=[{"role": "user", "content": [{"type": "\ud800{x}"}]}])
    raw = json.dumps(body)  # which spells it as an escape
    response = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages.0.content")


async def test_min_tokens_above_max_tokens_is_refused_not_cut(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json=completion_body(min_tokens=20))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "min_tokens"
