"""How a conversation reaches the template: who begins the next turn, which variables it has, what is counted before."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.calls import CHAT, chat_body, error_of
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}]


@pytest.mark.parametrize(
    ("fields", "begins", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": True}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": False}, True, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
async def test_who_goes_on(
    client: httpx.AsyncClient, codec: ByteCodec, fields: dict[str, Any], begins: bool, continues: bool
) -> None:
    assert (await client.post(CHAT, json=chat_body(messages=MESSAGES, **fields))).status_code == 200
    rendering = codec.renderings[0]
    assert (rendering["add_generation_prompt"], rendering["continue_final_message"]) == (begins, continues)


async def test_variables_of_the_template(client: httpx.AsyncClient, codec: ByteCodec) -> None:
    variables = {"enable_thinking": False, "date": "today", "limits": {"a": [1, None, 2.5]}}
    body = chat_body(chat_template_kwargs=variables, add_special_tokens=True)
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert codec.renderings[0]["variables"] == variables
    assert codec.renderings[0]["add_special_tokens"]


@pytest.mark.parametrize("value", [[], "x", 5, True, {"\ud800": 1}])
async def test_variables_must_be_an_object(client: httpx.AsyncClient, engine: FakeEngine, value: Any) -> None:
    raw = json.dumps(chat_body(chat_template_kwargs=value))
    response = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"].startswith("chat_template_kwargs")
    assert engine.requests == []


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"x": LONG[:90_000]}},
        {"messages": [{"role": "user", "content": LONG[:90_000]}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": f'"{LONG[:90_000]}"'}}],
                }
            ]
        },
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_rendered(
    client: httpx.AsyncClient, codec: ByteCodec, fields: dict[str, Any]
) -> None:
    error = error_of(await client.post(CHAT, json=chat_body(**fields)), 400)
    assert error["code"] == "context_length_exceeded"
    assert codec.conversations == []


@pytest.mark.parametrize("where", ["variables", "arguments"])
async def test_no_depth_is_an_error_of_ours(client: httpx.AsyncClient, where: str) -> None:
    """There is a window of a few levels that JSON's reader takes and its writer does not."""
    statuses = set()
    for depth in [10, *range(900, 1000, 2), 2000]:
        deep = "[" * depth + "]" * depth
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
        body = json.dumps(chat_body())[:-1]
        if where == "variables":
            body += f', "chat_template_kwargs": {{"a": {deep}}}}}'
        else:
            turns = [*MESSAGES[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
            body += f', "messages": {json.dumps(turns)}}}'
        response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        statuses.add(response.status_code)
    assert statuses <= {200, 400}
    assert 400 in statuses
