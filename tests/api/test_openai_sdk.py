"""The official SDK as a client, over TCP: what it parses, what it raises, what it retries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from actors.errors import ReplicaOverloaded
from actors.request import GenerateRequest
from tests.api.asgi_call import eventually
from tests.api.calls import MODEL
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine, Script


@pytest.fixture
async def sdk(server_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.script = Script(cached_tokens=3)
    reply = await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], seed=1)
    assert reply.choices[0].message.content == "Hello world"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_stream(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.script = Script(cached_tokens=3, deltas=(("한", (1, 2)), ("🙂", (3, 4, 5))))
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "한🙂"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.completions.create(model=MODEL, prompt=["a", "b"])
    assert [choice.text for choice in reply.choices] == ["Hello world"] * 2
    stream = await sdk.completions.create(model=MODEL, prompt=[1, 2], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world"


async def test_choices_logprobs_and_fingerprint(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        n=2,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"5": 1},
    )
    assert reply.system_fingerprint
    assert [choice.index for choice in reply.choices] == [0, 1]
    told = reply.choices[1].logprobs
    assert told is not None
    assert told.content is not None
    assert [(entry.token, entry.bytes, len(entry.top_logprobs)) for entry in told.content] == [
        ("\x01", [1], 2),
        ("\x02", [2], 2),
    ]
    old = await sdk.completions.create(model=MODEL, prompt="x", logprobs=1, echo=False, n=2)
    assert old.choices[1].logprobs is not None
    assert old.choices[1].logprobs.tokens == ["\x01", "\x02"]
    assert old.choices[1].logprobs.text_offset == [0, 1]


async def test_a_tool_call_streamed_and_whole(sdk: openai.AsyncOpenAI, engine: FakeEngine, codec: ByteCodec) -> None:
    codec.chat_template = "{{ tools }}<tool_call>"
    engine.script = Script.of(*'<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    messages: list[Any] = [{"role": "user", "content": ""}]
    whole = await sdk.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=99)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    async with sdk.chat.completions.stream(model=MODEL, messages=messages, tools=tools, max_tokens=99) as stream:
        final = await stream.get_final_completion()
    (same,) = final.choices[0].message.tool_calls or []
    assert same.function.arguments == call.function.arguments
    assert final.choices[0].finish_reason == "tool_calls"


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_typed_errors(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.completions.create(model="other", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.completions.create(model=MODEL, prompt="x" * 500, stream=True)
    assert bad.value.code == "context_length_exceeded"
    engine.script = Script(refusal=ReplicaOverloaded("full"))
    with pytest.raises(openai.InternalServerError) as full:
        await sdk.completions.create(model=MODEL, prompt="x")
    assert full.value.code == "server_is_overloaded"


async def test_error_within_a_stream(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.script = Script(fail_after=1)
    stream = await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True)
    with pytest.raises(openai.APIError, match="replica"):
        async for _ in stream:
            pass


async def test_overload_is_retried(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    def full_once(request: GenerateRequest) -> Script:
        return Script(refusal=ReplicaOverloaded("full")) if len(engine.requests) == 1 else Script()

    engine.script = full_once
    patient = sdk.with_options(max_retries=1)
    reply = await patient.completions.create(model=MODEL, prompt="x")
    assert reply.choices[0].text == "Hello world"


async def test_closing_a_stream_aborts_the_request(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.script = Script(endless=True, delay_s=0.002)
    stream = await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await eventually(lambda: engine.open_streams == 0)
