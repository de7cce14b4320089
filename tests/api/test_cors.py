"""Browsers: nothing is allowed unless its origin is named, and credentials never are."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.api.app import ApiSettings, build_app
from cluster.api.cors import MOST_HEADERS
from cluster.api.key_list import parse_keys
from cluster.api.keys import KeyRing
from tests.api.calls import CHAT, chat_body, error_of
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

PAGE = "https://chat.example.com"
KEY = "alice-0123456789-key"
STRANGERS = [
    "https://evil.example.com",
    "https://chat.example.com.evil.com",
    "http://chat.example.com",
    "https://chat.example.com:8443",
    "https://CHAT.example.com",
    "null",
    "*",
    "",
]


@pytest.fixture
async def page(engine: FakeEngine, codec: ByteCodec, no_leaks: None) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiSettings("org/tiny", 128, cors_origins=(PAGE, "http://localhost:3000"))
    app = build_app(settings, engine, codec, keys=KeyRing(parse_keys(f"alice:{KEY}")))
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers) as client:
        yield client


def cors_headers(response: httpx.Response) -> set[str]:
    return {name for name in response.headers if name.startswith("access-control-")}


def preflight(origin: str, headers: str = "authorization, content-type") -> dict[str, str]:
    return {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": headers}


@pytest.mark.parametrize("origin", [PAGE, *STRANGERS])
@pytest.mark.parametrize("path", [CHAT, "/health", "/nowhere"])
async def test_off_unless_origins_are_named(client: httpx.AsyncClient, path: str, origin: str) -> None:
    for response in (
        await client.options(path, headers=preflight(origin)),
        await client.post(path, json=chat_body(), headers={"origin": origin}),
    ):
        assert not cors_headers(response)


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
async def test_a_preflight_of_a_named_page(page: httpx.AsyncClient, origin: str) -> None:
    page.headers.pop("authorization")
    asked = "Authorization,content-type, x-stainless-lang"
    response = await page.options(CHAT, headers=preflight(origin, asked))
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == origin
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-lang"
    assert response.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in response.headers


async def test_what_a_preflight_asks_for_is_bounded_and_harmless(page: httpx.AsyncClient) -> None:
    asked = "x y, é," + ",".join(f"x-{number}" for number in range(2 * MOST_HEADERS))
    sent = {name.encode(): value.encode() for name, value in preflight(PAGE, asked).items()}
    response = await page.options(CHAT, headers=sent)
    allowed = response.headers["access-control-allow-headers"].split(", ")
    assert allowed == [f"x-{number}" for number in range(MOST_HEADERS - 2)]


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_to_a_named_page(page: httpx.AsyncClient, stream: bool) -> None:
    response = await page.post(CHAT, json=chat_body(stream=stream), headers={"origin": PAGE})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CHAT, {"authorization": "Bearer wrong"}, 401),
        ("/nowhere", {}, 404),
        (CHAT, {"content-type": "text/plain"}, 415),
        (CHAT + "?" + "a" * 10_000, {}, 414),
        (CHAT, {"x-long": "a" * 20_000}, 431),
    ],
)
async def test_a_named_page_can_read_errors(
    page: httpx.AsyncClient, path: str, headers: dict[str, str], status: int
) -> None:
    response = await page.post(path, content=b"{}", headers={"origin": PAGE, **headers})
    error_of(response, status)
    assert response.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("origin", STRANGERS)
async def test_a_strange_page_gets_nothing_to_read_with(page: httpx.AsyncClient, origin: str) -> None:
    for response in (
        await page.options(CHAT, headers=preflight(origin)),
        await page.post(CHAT, json=chat_body(), headers={"origin": origin}),
    ):
        assert not cors_headers(response)
        assert response.headers["vary"] == "Origin"
