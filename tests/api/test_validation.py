"""Ranges, types, fields that are known but not honoured, and what reaches the replica."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from actors.request import Sampling
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.fakes.engine import FakeEngine

INF, NAN = float("inf"), float("nan")

OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "model": (None, 5, "\ud800x"),
    "max_tokens": (0, -1, 1.5, "5", True, 1e18),
    "temperature": (NAN, INF, -INF, -0.1, 2.1, "1", True, 10**400),
    "top_p": (0, -1, 1.1, NAN, "x"),
    "top_k": (-2, 1.5, "5"),
    "min_p": (-0.1, 1.1, NAN),
    "seed": (2**63, -(2**63) - 1, 1.5, "1"),
    "stop": ("", [""], ["a"] * 5, 5, [5], {}, "\ud800"),
    "stop_token_ids": (5, [-1], [257], ["1"], [True]),
    "min_tokens": (-1, 17, 1.5),
    "n": (0, -1, 2, "1", True),
    "stream": ("yes", 1),
    "stream_options": ("x", {"include_usage": True}, {}),
    "cache_salt": ("", "x" * 129, 5),
    "user": (5,),
    "ignore_eos": ("x",),
    "skip_special_tokens": (1,),
    "include_stop_str_in_output": ("x",),
}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    """As httpx does, but also what strict JSON cannot say: NaN and half surrogates."""
    return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


async def test_every_honoured_field_reaches_the_replica(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = completion_body(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=10,
        min_p=0.1,
        seed=42,
        stop=["a", "bc"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        min_tokens=2,
        user="someone",
        cache_salt="tenant",
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        n=1,
    )
    assert (await post(client, COMPLETIONS, body)).status_code == 200
    request = engine.requests[0]
    assert request.sampling == Sampling(5, 0.5, 0.9, 10, 0.1, 42, (3, 4), True, 2)
    assert request.stop == ("a", "bc")
    assert request.salt == "tenant"
    assert not request.skip_special_tokens
    assert request.include_stop_str_in_output


async def test_null_means_not_given(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    names = "max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos min_tokens stream n user"
    names += " stream_options cache_salt skip_special_tokens include_stop_str_in_output max_completion_tokens tools"
    names += " logprobs top_logprobs logit_bias response_format tool_choice"
    response = await post(client, CHAT, chat_body(**dict.fromkeys(names.split())))
    assert response.status_code == 200
    room = 128 - len(engine.requests[0].prompt_token_ids)
    assert engine.requests[0].sampling == Sampling(room, 1.0, seed=1000)
    assert engine.requests[0].skip_special_tokens


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in OUT_OF_RANGE.items() for value in values]
)
async def test_values_out_of_range(client: httpx.AsyncClient, engine: FakeEngine, field: str, value: Any) -> None:
    error = error_of(await post(client, COMPLETIONS, completion_body(max_tokens=16) | {field: value}), 400)
    assert error["param"].split(".")[0] == field
    assert engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("logprobs", 0),
        ("logprobs", 5),
        ("top_logprobs", 2),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {"191222": -100}),
        ("tools", [{"type": "function"}]),
        ("tools", []),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "nosuch"}),
        ("response_format", {"type": "json_schema"}),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
        ("n", 2),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {}),
        ("guided_anything", "x"),
        ("prompt_logprobs", 1),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("continue_final_message", True),
        ("chat_template", "{{ x }}"),
        ("truncate_prompt_tokens", 5),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_known_fields_that_are_not_honoured_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, field: str, value: Any
) -> None:
    body = chat_body() if path == CHAT else completion_body()
    error = error_of(await post(client, path, body | {field: value}), 400)
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert "not supported" in error["message"]
    assert engine.requests == []


async def test_their_harmless_values_and_unknown_fields_pass(client: httpx.AsyncClient) -> None:
    harmless = {
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "bad_words": [],
        "guided_json": None,
        "metadata": {"a": 1},
        "some_sdk_extra": "\ud800",
    }
    assert (await post(client, COMPLETIONS, completion_body(**harmless))).status_code == 200


async def test_continuous_usage_is_refused(client: httpx.AsyncClient) -> None:
    body = completion_body(stream=True, stream_options={"continuous_usage_stats": True})
    assert error_of(await post(client, COMPLETIONS, body), 400)["param"] == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (-1, 2**64 - 1), (2**63 - 1, 2**63 - 1), (-(2**63), 2**63)])
async def test_seeds_of_any_sign(client: httpx.AsyncClient, engine: FakeEngine, seed: int, expected: int) -> None:
    await post(client, COMPLETIONS, completion_body(seed=seed))
    assert engine.requests[0].sampling.seed == expected


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (7, 7), (10**30, 257)])
async def test_top_k_off_and_huge(client: httpx.AsyncClient, engine: FakeEngine, top_k: int, expected: int) -> None:
    await post(client, COMPLETIONS, completion_body(top_k=top_k))
    assert engine.requests[0].sampling.top_k == expected


async def test_errors_are_few_and_short(client: httpx.AsyncClient) -> None:
    long = "x" * 5_000
    body = completion_body(max_tokens=long, temperature=long, top_p=long, top_k=long, seed=long, model="a")
    error = error_of(await post(client, COMPLETIONS, body), 400)
    assert error["param"] == "max_tokens"
    assert "and 2 more" in error["message"]
    assert long not in error["message"]


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    error = error_of(await post(client, CHAT, chat_body(model="gpt-\x00" + "9" * 5000)), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
