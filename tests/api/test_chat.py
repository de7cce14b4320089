"""POST /v1/chat/completions: the happy path, and how messages reach the template."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.api.reply import system_fingerprint
from tests.api.calls import CHAT, chat_body, error_of
from tests.api.conftest import CONTEXT
from tests.api.sse_oracle import read_stream
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine, Script


async def test_whole_reply(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script(cached_tokens=4, replica_id="r7", route="policy=cost; predicted=4; reason=x")
    response = await client.post(CHAT, json=chat_body())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-kvatlas-replica"] == "r7"
    assert response.headers["x-kvatlas-cached-tokens"] == "4"
    assert response.headers["x-kvatlas-route"] == "policy=cost; predicted=4; reason=x"
    prompt_tokens = len(engine.requests[0].prompt_token_ids)
    assert response.json() == {
        "id": f"chatcmpl-{engine.requests[0].request_id}",
        "object": "chat.completion",
        "created": 1234,
        "model": "org/tiny",
        "system_fingerprint": system_fingerprint("org/tiny", CONTEXT),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 2,
            "total_tokens": prompt_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script(cached_tokens=4, replica_id="r7", stop_reason="END")
    response = await client.post(CHAT, json=chat_body(stream=True))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-kvatlas-replica"] == "r7"
    assert response.headers["x-kvatlas-cached-tokens"] == "4"
    assert "x-kvatlas-route" not in response.headers
    transcript = read_stream(response.content, chat=True)
    assert transcript.texts == {0: "Hello world"}
    assert transcript.finish == {0: "stop"}
    assert transcript.chunks[-1]["choices"][0]["stop_reason"] == "END"
    assert transcript.head["id"] == f"chatcmpl-{engine.requests[0].request_id}"


async def test_deltas_without_text_are_not_sent_but_counted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script(deltas=(("", (1, 2)), ("a", (3,)), ("", (4,)), ("", (5,))))
    body = chat_body(stream=True, stream_options={"include_usage": True})
    transcript = read_stream((await client.post(CHAT, json=body)).content, chat=True, include_usage=True)
    assert len(transcript.chunks) == 4  # role, "a", finish, usage
    assert transcript.usage is not None
    assert transcript.usage["completion_tokens"] == 5


async def test_max_tokens_defaults_to_the_rest_of_the_context(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(CHAT, json=chat_body())
    request = engine.requests[0]
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt_token_ids)


async def test_max_completion_tokens_wins_over_max_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(CHAT, json=chat_body(max_completion_tokens=1, max_tokens=50))
    assert engine.requests[0].sampling.max_tokens == 1
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_content_as_text_parts(client: httpx.AsyncClient, codec: ByteCodec) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (await client.post(CHAT, json=chat_body(messages=[{"role": "user", "content": parts}]))).status_code == 200
    assert codec.conversations == [[{"role": "user", "content": "one\ntwo"}]]


async def test_null_content_of_an_assistant_with_tool_calls(client: httpx.AsyncClient, codec: ByteCodec) -> None:
    codec.chat_template = "{{ tools }}<tool_call>"
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    assert (await client.post(CHAT, json=chat_body(messages=messages))).status_code == 200
    rendered = call | {"function": {"name": "add", "arguments": {"a": 1}}}
    assert codec.conversations[0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [rendered]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ({"role": "user", "content": "Hi"}, "messages"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": ["Hi"]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content"),
        ([{"role": "user", "content": "Hi"}, {"role": "robot", "content": "x"}], "messages.1.role"),
        ([{"content": "Hi"}], "messages.0.role"),
        ([{"role": "user", "content": "\ud800"}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], "messages.0.content"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
async def test_bad_messages(client: httpx.AsyncClient, engine: FakeEngine, messages: Any, param: str) -> None:
    # Sent as ASCII: JSON may spell half a surrogate pair, UTF-8 may not.
    error = error_of(await post_ascii(client, chat_body(messages=messages)), 400)
    assert error["param"] == param
    assert engine.requests == []


async def test_the_templates_own_message_reaches_the_client(client: httpx.AsyncClient) -> None:
    turn = {"role": "user", "content": "x"}
    error = error_of(await client.post(CHAT, json=chat_body(messages=[turn, turn])), 400)
    assert "roles must alternate" in error["message"]
    assert error["param"] == "messages"


async def post_ascii(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post(CHAT, content=json.dumps(body), headers={"content-type": "application/json"})
