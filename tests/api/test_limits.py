"""URLs and headers of every size: refused in the envelope beyond the bounds, served below them."""

from __future__ import annotations

import httpx
import pytest

from cluster.api.limits import HEADER_BYTES, HEADERS, URL_BYTES
from tests.api.calls import CHAT, chat_body, error_of
from tests.fakes.engine import FakeEngine


@pytest.mark.parametrize("url", ["/v1/models?{}", "/v1/models/{}", "/{}", "/health?{}", "/debug/state?{}"])
async def test_a_long_url_is_414(client: httpx.AsyncClient, url: str) -> None:
    response = await client.get(url.format("a" * URL_BYTES))
    assert error_of(response, 414)["code"] == "url_too_long"


async def test_what_counts_is_the_url_as_sent(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health?" + "a" * (URL_BYTES - len("/health")))).status_code == 200
    assert (await client.get("/health?" + "a" * (URL_BYTES - len("/health") + 1))).status_code == 414
    assert (await client.get("/" + "%20" * (URL_BYTES // 3 + 1))).status_code == 414


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PUT"])
async def test_many_headers_are_431(client: httpx.AsyncClient, engine: FakeEngine, method: str) -> None:
    headers = [(f"x-{number}", "1") for number in range(HEADERS + 1)]
    response = await client.request(method, CHAT, headers=headers, json=chat_body())
    assert error_of(response, 431)["code"] == "headers_too_large"
    assert not engine.requests


@pytest.mark.parametrize("name", ["x-long", "authorization", "x-request-id", "x-session-id", "content-type", "cookie"])
async def test_a_long_header_is_431(client: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    response = await client.post(CHAT, json=chat_body(), headers={name: "a" * HEADER_BYTES})
    assert error_of(response, 431)["code"] == "headers_too_large"
    assert not engine.requests


async def test_what_is_usual_passes(client: httpx.AsyncClient) -> None:
    headers = [(f"x-{number}", "v" * 100) for number in range(100)]
    assert (await client.post(CHAT, json=chat_body(), headers=headers)).status_code == 200
