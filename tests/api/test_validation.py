"""Ranges, types, fields that are known but not honoured, and what reaches the replica."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from actors.request import Sampling
from cluster.api.app import ApiSettings, build_app
from cluster.api.fields import MAX_STOP_CHARS
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.fakes.codec import ByteCodec
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
    "n": (0, -1, 129, "1", True, 1.5),
    "best_of": (0, 2, "1", True),
    "presence_penalty": (-2.1, 2.1, NAN, "1"),
    "frequency_penalty": (-2.1, 2.1, INF, True),
    "repetition_penalty": (0, -1, 0.001, 101, NAN, "1"),
    "logit_bias": ({"1": 100.5}, {"1": "5"}, {"1": None}, {"257": 1}, {"-1": 1}, {"01": 1}, {"": 1}, {"٣": 1}, [], 5),
    "allowed_token_ids": ([], [257], [-1], ["1"], 5, [True], [1] * 8193),
    "logprobs": (-1, 21, "1", True, 1.5),
    "priority": (2**31, -(2**31) - 1, "1", 1.5, True),
    "add_special_tokens": (1,),
    "return_token_ids": ("x",),
    "return_tokens_as_token_ids": (0,),
    "echo": (1, "x"),
    "stream": ("yes", 1),
    "stream_options": ("x", {"include_usage": True}, {}),
    "cache_salt": ("", "x" * 129, 5, "a\x00b", "\x00", "\ud800"),
    "user": (5,),
    "ignore_eos": ("x",),
    "skip_special_tokens": (1,),
    "include_stop_str_in_output": ("x",),
}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    """As httpx does, but also what strict JSON cannot say: NaN and half surrogates."""
    return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_honoured_field_reaches_the_replica(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    fields = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10,
        "min_p": 0.1,
        "seed": 42,
        "stop": ["a", "bc"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "min_tokens": 2,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"0": -100, "256": 100, "7": 0.5},
        "allowed_token_ids": [5, 6, 5],
        "logprobs": True if path == CHAT else 3,
        "top_logprobs": 3 if path == CHAT else 0,
        "user": "someone",
        "cache_salt": "tenant",
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "n": 1,
        "best_of": 1,
    }
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    response = await post(client, path, body)
    assert response.status_code == 200, response.text
    request = engine.requests[0]
    assert request.sampling == Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=10,
        min_p=0.1,
        seed=42,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        min_tokens=2,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        repetition_penalty=1.2,
        logit_bias=((0, -100.0), (256, 100.0), (7, 0.5)),
        allowed_token_ids=(5, 6),
        logprobs=3,
    )
    assert request.stop == ("a", "bc")
    assert request.salt == "tenant"
    assert request.priority == 0
    assert request.grammar is None
    assert not request.skip_special_tokens
    assert request.include_stop_str_in_output


async def test_null_means_not_given(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    names = "max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos min_tokens stream n user"
    names += " stream_options cache_salt skip_special_tokens include_stop_str_in_output max_completion_tokens tools"
    names += " logprobs top_logprobs logit_bias response_format tool_choice best_of presence_penalty frequency_penalty"
    names += " repetition_penalty allowed_token_ids priority add_special_tokens return_token_ids structured_outputs"
    names += " guided_json guided_regex guided_choice guided_grammar add_generation_prompt continue_final_message"
    names += " chat_template_kwargs parallel_tool_calls return_tokens_as_token_ids suffix echo reasoning_effort"
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


REFUSED_EVERYWHERE: list[tuple[str, Any]] = [
    ("suffix", "x"),
    ("prompt_logprobs", 1),
    ("prompt_logprobs", 0),
    ("bad_words", ["x"]),
    ("chat_template", "{{ x }}"),
    ("documents", [{"text": "x"}]),
    ("truncate_prompt_tokens", 5),
    ("guided_anything", "x"),
    ("guided_whitespace_pattern", " "),
    ("reasoning_effort", "high"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x"}),
    ("use_beam_search", True),
    ("length_penalty", 1.1),
    ("typical_p", 0.5),
    ("logits_processors", ["x"]),
    ("spaces_between_special_tokens", False),
    ("verbosity", "high"),
    ("web_search_options", {}),
]
REFUSED: list[tuple[str, str, Any]] = [
    *((path, field, value) for path in (CHAT, COMPLETIONS) for field, value in REFUSED_EVERYWHERE),
    (CHAT, "echo", True),
    (COMPLETIONS, "top_logprobs", 2),
    (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}]),
    (COMPLETIONS, "tool_choice", "auto"),
    (COMPLETIONS, "chat_template_kwargs", {"x": 1}),
    (COMPLETIONS, "continue_final_message", True),
    (COMPLETIONS, "add_generation_prompt", False),
]


@pytest.mark.parametrize(("path", "field", "value"), REFUSED)
async def test_known_fields_that_are_not_honoured_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, field: str, value: Any
) -> None:
    body = chat_body() if path == CHAT else completion_body()
    error = error_of(await post(client, path, body | {field: value}), 400)
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert "not supported" in error["message"]
    assert engine.requests == []


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    (CHAT, {"logprobs": 5}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"n": 2, "best_of": 3}, "best_of"),
    (COMPLETIONS, {"echo": True, "logprobs": 0}, "echo"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": ["x"] * 3, "n": 100}, "n"),
    (CHAT, {"priority": 1}, "priority"),
    (COMPLETIONS, {"priority": -1}, "priority"),
    (COMPLETIONS, {"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
]


@pytest.mark.parametrize(("path", "fields", "param"), CONTRADICTIONS)
async def test_fields_that_contradict_each_other(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    assert error_of(await post(client, path, body), 400)["param"] == param
    assert engine.requests == []


async def test_priority_where_it_is_allowed(settings: ApiSettings, engine: FakeEngine, codec: ByteCodec) -> None:
    app = build_app(replace(settings, allow_priority=True), engine, codec)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post(CHAT, json=chat_body(priority=-3))).status_code == 200
        assert (await client.post(COMPLETIONS, json=completion_body(n=2, priority=9))).status_code == 200
    assert [request.priority for request in engine.requests] == [-3, 9, 9]


async def test_their_harmless_values_and_unknown_fields_pass(client: httpx.AsyncClient) -> None:
    harmless = {
        "top_logprobs": 0,
        "tool_choice": "none",
        "reasoning_effort": "none",
        "priority": 0,
        "parallel_tool_calls": False,
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


async def test_a_stop_string_is_bounded(client: httpx.AsyncClient) -> None:
    longest = "s" * MAX_STOP_CHARS
    assert (await client.post(COMPLETIONS, json=completion_body(stop=[longest]))).status_code == 200
    error = error_of(await client.post(COMPLETIONS, json=completion_body(stop=["x", longest + "s"])), 400)
    assert error["param"] == "stop.1"
    assert str(MAX_STOP_CHARS) in error["message"]
