"""The official SDK as a client, over TCP: what it parses, what it raises, what it retries."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from actors.errors import ReplicaOverloaded
from actors.request import GenerateRequest
from tests.api.asgi_call import eventually
from tests.api.calls import MODEL
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
