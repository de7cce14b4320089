"""Tool calls over HTTP: what reaches template and replica, and that a stream tells the calls of the whole reply."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from cluster.api.app import ApiSettings, build_app
from tests.api.calls import CHAT, chat_body, error_of
from tests.api.sse_oracle import read_stream
from tests.api.test_openapi import described
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine, Script

HERMES = "{{ tools }}<tool_call>"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
SUB = {"type": "function", "function": {"name": "sub"}}
TOOLS = [ADD, SUB]
CALL_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALL_SUB = '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
ANSWERS = [
    "just text",
    CALL_ADD,
    f"Let me see.\n{CALL_ADD}\n{CALL_SUB}",
    f"{CALL_SUB}{CALL_ADD}",
    "<tool_call>\nnot a call</tool_call>",
    '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
    "a < b <tool",
    f"é🙂{CALL_ADD}",
]


@pytest.fixture
def settings() -> ApiSettings:
    """With room for tools: a token is a byte here."""
    return ApiSettings("org/tiny", 4000)


@pytest.fixture
def codec() -> ByteCodec:
    codec = ByteCodec()
    codec.chat_template = HERMES
    return codec


def without_ids(calls: list[dict[str, Any]]) -> list[Any]:
    return [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def pieces_of(text: str, cuts: list[int]) -> Script:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return Script.of(*(text[start:end] for start, end in itertools.pairwise(places)))


@examples(max_examples=60, deadline=None)
@given(answer=st.sampled_from(ANSWERS), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_a_stream_tells_the_calls_of_the_whole_reply(answer: str, cuts: list[int]) -> None:
    """For every way to cut the answer into deltas."""
    codec = ByteCodec()
    codec.chat_template = HERMES
    engine = FakeEngine(pieces_of(answer, cuts))
    app = build_app(ApiSettings("org/tiny", 1000), engine, codec)
    body = chat_body(tools=TOOLS, max_tokens=500)

    async def both() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(CHAT, json=body), await client.post(CHAT, json=body | {"stream": True})

    whole, streamed = asyncio.run(both())
    choice = whole.json()["choices"][0]
    transcript = read_stream(streamed.content, chat=True)
    calls = choice["message"].get("tool_calls", [])
    assert without_ids(transcript.calls.get(0, [])) == without_ids(calls)
    assert transcript.texts[0] == (choice["message"]["content"] or "")
    assert transcript.finish[0] == choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        json.loads(call["function"]["arguments"])
    if not calls:
        assert choice["message"]["content"] == answer


async def test_two_calls_and_content_beside_them(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of(ANSWERS[2])
    choice = (await client.post(CHAT, json=chat_body(tools=TOOLS))).json()["choices"][0]
    assert without_ids(choice["message"]["tool_calls"]) == [
        ("function", "add", '{"a": 1}'),
        ("function", "sub", "{}"),
    ]
    assert choice["message"]["content"].startswith("Let me see.")
    assert choice["finish_reason"] == "tool_calls"


async def test_calls_are_as_the_document_says(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of(CALL_ADD)
    document = (await client.get("/openapi.json")).json()
    reply = (await client.post(CHAT, json=chat_body(tools=TOOLS))).json()
    assert reply["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(reply, described(document, "post", CHAT, 200))


async def test_content_is_null_beside_calls_that_say_it_all(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of(CALL_ADD)
    message = (await client.post(CHAT, json=chat_body(tools=TOOLS))).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_choices_have_readers_of_their_own(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: Script.of(*CALL_ADD) if request.choice else Script.of(*"plain text")
    response = await client.post(CHAT, json=chat_body(tools=TOOLS, n=2, stream=True, max_tokens=100))
    transcript = read_stream(response.content, chat=True, choices=2)
    assert transcript.texts == {0: "plain text", 1: ""}
    assert list(transcript.calls) == [1]
    assert transcript.finish == {0: "stop", 1: "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_off_in_a_call_says_that_it_was_cut_off(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.script = Script.of(CALL_ADD[:-15]).but(finish_reason="length")
    response = await client.post(CHAT, json=chat_body(tools=TOOLS, stream=stream))
    if stream:
        assert read_stream(response.content, chat=True).finish == {0: "length"}
    else:
        assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_without_tools_tags_are_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of(*CALL_ADD)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        reply = (await client.post(CHAT, json=chat_body(max_tokens=100, **fields))).json()["choices"][0]
        assert reply["message"] == {"role": "assistant", "content": CALL_ADD, "refusal": None}
        assert reply["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
    ],
)
async def test_what_the_replica_and_the_template_are_told(
    client: httpx.AsyncClient, engine: FakeEngine, codec: ByteCodec, fields: dict[str, Any], has_grammar: bool
) -> None:
    response = await client.post(CHAT, json=chat_body(tools=TOOLS, **fields))
    assert response.status_code == 200, response.text
    assert (engine.requests[0].grammar is not None) == has_grammar
    shown = [tool["function"]["name"] for tool in codec.renderings[0]["tools"] or []]
    assert shown == ([] if fields.get("tool_choice") == "none" else ["add", "sub"])


async def test_a_model_without_a_way_to_write_calls_is_told_of_the_tools(
    client: httpx.AsyncClient, codec: ByteCodec
) -> None:
    codec.chat_template = "{{ messages }}"
    body = chat_body(tools=[SUB], messages=[{"role": "user", "content": "1"}], max_tokens=5)
    assert (await client.post(CHAT, json=body)).status_code == 200
    told = codec.conversations[0][0]
    assert told["role"] == "system"
    assert "sub" in told["content"]
    assert codec.renderings[0]["tools"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools.0"),
        ({"tools": [ADD, ADD]}, "tools.1.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nosuch"}}}]},
            "tools.0.function.parameters",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_tools(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, stream: bool
) -> None:
    error = error_of(await client.post(CHAT, json=chat_body(stream=stream, **fields)), 400)
    assert error["param"].startswith(param)
    assert engine.requests == []


async def test_logprobs_go_with_calls(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of(*CALL_ADD)
    body = chat_body(tools=TOOLS, logprobs=True, return_token_ids=True, max_tokens=100)
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]
    transcript = read_stream((await client.post(CHAT, json=body | {"stream": True})).content, chat=True)
    assert transcript.logprobs[0]["content"] == whole["logprobs"]["content"]
    assert transcript.token_ids[0] == whole["token_ids"] == list(range(len(CALL_ADD)))
