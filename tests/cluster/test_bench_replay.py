"""Replay against the real HTTP app over a scripted engine would need a socket; here a canned transport does."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from cluster.bench.replay import first_model, one

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def events(*payloads: object) -> bytes:
    return b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads) + b"data: [DONE]\n\n"


def client(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(handler))


async def test_a_complete_stream() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert (body["prompt"], body["max_tokens"], body["stream"]) == ("p", 2, True)
        text = [{"choices": [{"text": t, "finish_reason": None}]} for t in ("", "a", "b")]
        return httpx.Response(200, content=events(*text, {"choices": [], "usage": USAGE}))

    async with client(answer) as http:
        outcome = await one(http, "m", "p", 2)
    assert not outcome.error
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (7, 4, 2)
    assert 0 < outcome.ttft_s <= outcome.total_s


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(503, json={"error": {"message": "full"}}), "HTTP 503"),
        (httpx.Response(200, content=events({"error": {"message": "died"}})), "died"),
        (httpx.Response(200, content=events({"choices": [{"text": "a"}]})), "ended early"),
        (httpx.Response(200, content=b"data: {\n\n"), "JSONDecodeError"),
    ],
)
async def test_what_goes_wrong_is_an_outcome(response: httpx.Response, words: str) -> None:
    async with client(lambda _: response) as http:
        assert words in (await one(http, "m", "p", 2)).error


ROUTE = {"x-kvatlas-replica": "r1", "x-kvatlas-route": "policy=cost; predicted_tokens=4"}


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, headers=ROUTE, content=events({"choices": [{"text": "a"}], "usage": USAGE})),
        httpx.Response(503, headers=ROUTE, json={}),
        httpx.Response(200, headers=ROUTE, content=events({"error": {"message": "died"}})),
        httpx.Response(200, headers=ROUTE, content=events({"choices": [{"text": "a"}]})),
        httpx.Response(200, headers=ROUTE, content=b"data: {\n\n"),
    ],
    ids=["complete", "refused", "died", "early", "garbled"],
)
async def test_who_answered_and_why_is_kept_also_of_failures(response: httpx.Response) -> None:
    async with client(lambda _: response) as http:
        outcome = await one(http, "m", "p", 2)
    assert (outcome.replica, outcome.route) == ("r1", "policy=cost; predicted_tokens=4")


async def test_no_connection_is_an_outcome() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client(refuse) as http:
        assert "ConnectError" in (await one(http, "m", "p", 2)).error


async def test_the_first_model_is_taken() -> None:
    async with client(lambda _: httpx.Response(200, json={"data": [{"id": "m1"}, {"id": "m2"}]})) as http:
        assert await first_model(http) == "m1"
    async with client(lambda _: httpx.Response(200, json={"data": []})) as http:
        with pytest.raises(ValueError, match="no model"):
            await first_model(http)
