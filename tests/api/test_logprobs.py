"""Log probabilities: what a token is called, where it begins in the text, and that stream and whole reply agree."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.request import Delta, TokenLogprob
from cluster.api.app import ApiSettings, build_app
from cluster.api.logprobs import FLOOR, CompletionLogprobs, TokenNames, chat_logprobs, finite, joined
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body
from tests.api.sse_oracle import read_stream
from tests.fakes.codec import TURN, ByteCodec
from tests.fakes.engine import FakeEngine, Script

EURO = tuple("€".encode())


def _delta(*tokens: int, top: tuple[tuple[int, float], ...] = ()) -> Delta:
    return Delta("", tokens, logprobs=tuple(TokenLogprob(-0.5, top) for _ in tokens))


def test_names_of_tokens() -> None:
    assert TokenNames(ByteCodec()).of(97) == "a"
    assert TokenNames(ByteCodec()).of(0xE2) == "\\xe2"
    assert TokenNames(ByteCodec(), prefix="bytes:").of(0xE2) == "bytes:\\xe2"
    assert TokenNames(ByteCodec(), as_ids=True).of(97) == "token_id:97"
    assert TokenNames(ByteCodec()).of(TURN) == "<turn>"


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30, -10_000.0])
def test_no_value_is_below_the_floor(value: float) -> None:
    assert finite(value) == FLOOR
    told = Delta("", (97,), logprobs=(TokenLogprob(value, ((98, value),)),))
    assert "-9999" in json.dumps(chat_logprobs(TokenNames(ByteCodec()), told), allow_nan=False)
    names = CompletionLogprobs(TokenNames(ByteCodec()), skip_special_tokens=True)
    assert "-9999" in json.dumps(names.take(told), allow_nan=False)


def test_chat_tells_the_bytes_of_parts_of_characters() -> None:
    told = chat_logprobs(TokenNames(ByteCodec()), _delta(97, EURO[0], top=((98, -1.0),)))
    assert told == {
        "content": [
            {
                "token": token,
                "logprob": -0.5,
                "bytes": raw,
                "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}],
            }
            for token, raw in (("a", [97]), ("\\xe2", [0xE2]))
        ],
        "refusal": None,
    }


@given(text=st.text(max_size=12), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_offsets_are_where_tokens_begin_in_the_text(text: str, cuts: list[int]) -> None:
    """A token that is part of a character begins where the character does."""
    raw = text.encode()
    told = CompletionLogprobs(TokenNames(ByteCodec()), skip_special_tokens=True)
    parts = []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(raw)], strict=True):
        parts.append(told.take(_delta(*raw[start:end])))
    offsets = joined(parts).get("text_offset", [])
    expected = [index for index, char in enumerate(text) for _ in char.encode()]
    assert offsets == expected


@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 1, 1]), (False, [0, 1, 7])])
def test_special_tokens_count_only_where_they_are_text(skip: bool, offsets: list[int]) -> None:
    told = CompletionLogprobs(TokenNames(ByteCodec()), skip_special_tokens=skip).take(_delta(97, TURN, 98))
    assert told["text_offset"] == offsets


def test_the_chosen_token_is_among_the_likeliest_or_beside_them() -> None:
    told = CompletionLogprobs(TokenNames(ByteCodec()), skip_special_tokens=True)
    assert told.take(_delta(97, top=((98, -0.1), (99, -0.2))))["top_logprobs"] == [{"b": -0.1, "c": -0.2, "a": -0.5}]
    assert told.take(_delta(97, top=((97, -0.5),)))["top_logprobs"] == [{"a": -0.5}]
    assert told.take(_delta(97))["top_logprobs"] == [{"a": -0.5}]


@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        (CHAT, {}, None),
        (CHAT, {"logprobs": False}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": None}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
    ],
)
async def test_what_the_replica_is_asked_for(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], asked: int | None
) -> None:
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    choice = (await client.post(path, json=body)).json()["choices"][0]
    assert engine.requests[0].sampling.logprobs == asked
    if asked is None:
        assert choice["logprobs"] is None
    elif path == CHAT:
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [asked, asked]
    else:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_tokens_as_ids(client: httpx.AsyncClient, path: str) -> None:
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "logprobs": True if path == CHAT else 1}
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    told = (await client.post(path, json=body)).json()["choices"][0]["logprobs"]
    tokens = [entry["token"] for entry in told["content"]] if path == CHAT else told["tokens"]
    assert tokens == ["token_id:1", "token_id:2"]


@settings(max_examples=30, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.text(max_size=3), st.lists(st.integers(0, 255), max_size=3).map(tuple)), min_size=1, max_size=8
    ),
    chat=st.booleans(),
    count=st.integers(0, 3),
)
def test_streamed_log_probabilities_are_those_of_the_whole_reply(
    pieces: list[tuple[str, tuple[int, ...]]], chat: bool, count: int
) -> None:
    app = build_app(ApiSettings("org/tiny", 1000), FakeEngine(Script(deltas=tuple(pieces))), ByteCodec())
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}
    body = chat_body(**fields, max_tokens=500) if chat else completion_body(**fields, max_tokens=500)

    async def both() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            path = CHAT if chat else COMPLETIONS
            return await client.post(path, json=body), await client.post(path, json=body | {"stream": True})

    whole, streamed = asyncio.run(both())
    told = whole.json()["choices"][0]["logprobs"]
    told.pop("refusal", None)
    tokens = sum(len(ids) for _, ids in pieces)
    assert len(told["content" if chat else "tokens"]) == tokens
    transcript = read_stream(streamed.content, chat=chat)
    assert transcript.logprobs.get(0, {name: [] for name in told}) == told
