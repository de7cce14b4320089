"""POST /tokenize and /detokenize: the tokens that generation would see, and back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.calls import CHAT, COMPLETIONS, MODEL, chat_body, completion_body, error_of
from tests.api.conftest import CONTEXT
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TURN = {"role": "user", "content": "Hi"}


async def post(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    """As ASCII, which can also spell half of a surrogate pair."""
    return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


async def test_prompt(client: httpx.AsyncClient) -> None:
    reply = (await client.post(TOKENIZE, json={"model": MODEL, "prompt": "aé"})).json()
    assert reply == {"count": 3, "max_model_len": CONTEXT, "tokens": [97, 0xC3, 0xA9]}


async def test_token_strs_are_the_names_that_log_probabilities_have(client: httpx.AsyncClient) -> None:
    reply = (await client.post(TOKENIZE, json={"prompt": "aé", "return_token_strs": True})).json()
    assert reply["token_strs"] == ["a", "\\xc3", "\\xa9"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"tool_choice": "none", "tools": [TOOL]}, {"messages": [TURN, {"role": "assistant", "content": "x"}]}],
)
async def test_the_tokens_are_those_of_generation(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    counted = (await client.post(TOKENIZE, json={"messages": [TURN]} | fields)).json()
    assert (await client.post(CHAT, json=chat_body(messages=[TURN]) | fields)).status_code == 200
    assert tuple(counted["tokens"]) == engine.requests[0].prompt_token_ids
    assert counted["count"] == len(counted["tokens"])
    prompt = (await client.post(TOKENIZE, json={"prompt": "x y"})).json()
    assert (await client.post(COMPLETIONS, json=completion_body(prompt="x y"))).status_code == 200
    assert tuple(prompt["tokens"]) == engine.requests[1].prompt_token_ids


async def test_tools_count_with_the_messages(client: httpx.AsyncClient, codec: ByteCodec) -> None:
    codec.chat_template = "{{ tools }}<tool_call>"
    assert (await client.post(TOKENIZE, json={"messages": [TURN], "tools": [TOOL]})).status_code == 200
    assert codec.renderings[-1]["tools"] == [TOOL]


async def test_how_a_conversation_is_rendered(client: httpx.AsyncClient, codec: ByteCodec) -> None:
    body = {"messages": [TURN], "continue_final_message": True, "chat_template_kwargs": {"x": [1]}}
    assert (await client.post(TOKENIZE, json=body)).status_code == 200
    assert codec.renderings[-1] == {
        "tools": None,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": False,
        "variables": {"x": [1]},
    }


async def test_a_conversation_longer_than_the_context_can_be_counted(client: httpx.AsyncClient) -> None:
    text = "x" * (CONTEXT - 2)
    reply = (await client.post(TOKENIZE, json={"messages": [TURN | {"content": text}]})).json()
    assert reply["count"] > CONTEXT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [TURN]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * (CONTEXT + 1)}, "prompt"),
        ({"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [TURN | {"content": "x" * 5000}]}, "messages"),
        ({"messages": [TURN, TURN]}, "messages"),
        ({"messages": [TURN], "tools": []}, "tools"),
        ({"messages": [TURN], "tool_choice": "auto"}, "tool_choice"),
        ({"messages": [TURN], "chat_template_kwargs": []}, "chat_template_kwargs"),
        (
            {"messages": [TURN], "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_tokenized(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert error_of(await post(client, TOKENIZE, body), 400)["param"] == param


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
async def test_another_model(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": "other", "prompt": "x", "tokens": [1]}
    assert error_of(await client.post(path, json=body), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    "tokens", [None, 5, "x", [-1], [257], ["1"], [True], [1.5], [1] * (CONTEXT + 1), [10**400], [[1]]]
)
async def test_what_cannot_be_detokenized(client: httpx.AsyncClient, tokens: Any) -> None:
    error = error_of(await post(client, DETOKENIZE, {"tokens": tokens}), 400)
    assert error["param"].split(".")[0] == "tokens"


@pytest.mark.parametrize(
    ("tokens", "text"), [([], ""), ([97, 0xC3, 0xA9], "aé"), ([0xC3], "\ufffd"), ([256, 97], "<turn>a")]
)
async def test_detokenize(client: httpx.AsyncClient, tokens: list[int], text: str) -> None:
    assert (await client.post(DETOKENIZE, json={"tokens": tokens})).json() == {"prompt": text}


@pytest.mark.parametrize("text", ["Hi", "é漢🙂", "\x00\n", '"\\', "<turn>"])
async def test_there_and_back(client: httpx.AsyncClient, text: str) -> None:
    tokens = (await client.post(TOKENIZE, json={"prompt": text})).json()["tokens"]
    assert (await client.post(DETOKENIZE, json={"tokens": tokens})).json() == {"prompt": text}
