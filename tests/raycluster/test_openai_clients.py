"""The `openai` SDK, as its users call it, against the whole application: what it asks for comes back, and errors are its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolUnionParam,
)
from pydantic import BaseModel

from tests.raycluster.conftest import Served

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ASKED: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one sentence, whatever is asked."},
    {"role": "user", "content": "What is a paged pool of key and value blocks good for?"},
]
WEATHER: list[ChatCompletionToolUnionParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Zürich"]}, "days": {"type": "integer", "enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


class Verdict(BaseModel):
    """What a model may say; short whatever it says."""

    answer: Literal["yes", "no"]
    sure: bool


@pytest.fixture
def sdk(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(sdk: openai.OpenAI, served: Served) -> None:
    assert [card.id for card in sdk.models.list()] == [served.model]
    assert sdk.models.retrieve(served.model).id == served.model


def test_a_stream_says_what_a_whole_answer_says(sdk: openai.OpenAI, served: Served) -> None:
    common: dict[str, Any] = {"model": served.model, "messages": ASKED, "seed": 7, "max_tokens": 40}
    whole = sdk.chat.completions.create(**common)
    chunks = list(sdk.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == [whole.choices[0].finish_reason]
    told = chunks[-1].usage
    assert told is not None
    assert whole.usage is not None
    assert (told.prompt_tokens, told.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert told.prompt_tokens_details is not None
    assert told.prompt_tokens_details.cached_tokens


def test_choices_and_logprobs_of_a_chat(sdk: openai.OpenAI, served: Served) -> None:
    reply = sdk.chat.completions.create(
        model=served.model, messages=ASKED, n=3, seed=1, max_tokens=5, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content
        assert entries
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_completions_of_several_prompts_with_logprobs_and_echo(sdk: openai.OpenAI, served: Served) -> None:
    prompts = ["One prompt", "and another"]
    reply = sdk.completions.create(model=served.model, prompt=prompts, max_tokens=4, logprobs=1, temperature=0)
    assert len(reply.choices) == 2
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)
    echoed = sdk.completions.create(model=served.model, prompt=prompts, max_tokens=4, echo=True, temperature=0)
    assert [choice.text for choice in echoed.choices] == [
        prompt + choice.text for prompt, choice in zip(prompts, reply.choices, strict=True)
    ]


def test_an_answer_parsed_into_a_model_of_pydantic(sdk: openai.OpenAI, served: Served) -> None:
    for seed in range(3):
        reply = sdk.chat.completions.parse(
            model=served.model, messages=ASKED, response_format=Verdict, seed=seed, max_tokens=200
        )
        assert reply.choices[0].finish_reason == "stop"
        assert isinstance(reply.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called_and_its_arguments_stream(sdk: openai.OpenAI, served: Served, choice: Any) -> None:
    common: dict[str, Any] = {"model": served.model, "messages": ASKED, "tools": WEATHER, "tool_choice": choice}
    common |= {"seed": 3, "max_tokens": 300, "parallel_tool_calls": False}
    reply = sdk.chat.completions.create(**common)
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Zürich")
    assert arguments["days"] in (1, 2, 3)

    name, streamed, finish = "", "", None
    for chunk in sdk.chat.completions.create(**common, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.function is not None
            name += piece.function.name or ""
            streamed += piece.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (name, streamed, finish) == ("weather", call.function.arguments, "tool_calls")


def test_errors_are_the_exceptions_that_users_catch(sdk: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="no-such-model", messages=ASKED)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model=served.model, prompt="word " * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as hot:
        sdk.chat.completions.create(model=served.model, messages=ASKED, temperature=9, stream=True)
    assert hot.value.param == "temperature"
    schema: Any = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model=served.model, messages=ASKED, response_format=schema)
    assert (bad.value.param or "").startswith("response_format")


async def test_many_streams_at_once_do_not_mix(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        async def text(seed: int, stream: bool) -> str:
            common: dict[str, Any] = {"model": served.model, "prompt": "All the same", "seed": seed, "max_tokens": 24}
            if not stream:
                return str((await client.completions.create(**common)).choices[0].text)
            chunks = await client.completions.create(**common, stream=True)
            return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

        streamed = await asyncio.gather(*(text(seed, True) for seed in range(16)))
        whole = await asyncio.gather(*(text(seed, False) for seed in range(16)))
    assert streamed == whole
    assert len(set(streamed)) > 8
