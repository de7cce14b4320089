"""x-request-id: harmless, bounded, echoed; and never the id that a replica knows."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from cluster.api.app import ApiSettings, build_app
from tests.api.calls import CHAT, chat_body
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (b"abc-123", "abc-123"),
        (b"a b\tc", "abc"),
        (b"x" * 1_000_000, "x" * 128),
        ("é1".encode(), "1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_echo(client: httpx.AsyncClient, given: bytes, echoed: str, stream: bool) -> None:
    response = await client.post(CHAT, json=chat_body(stream=stream), headers={b"x-request-id": given})
    assert response.headers.get_list("x-request-id") == [echoed]


@pytest.mark.parametrize("given", [None, b"", "é".encode(), b" "])
async def test_our_own_where_there_is_none(client: httpx.AsyncClient, given: bytes | None) -> None:
    headers = {} if given is None else {b"x-request-id": given}
    response = await client.get("/health", headers=headers)
    assert response.headers["x-request-id"].startswith("id")


async def test_equal_ids_of_two_clients_are_two_requests(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for _ in range(2):
        await client.post(CHAT, json=chat_body(), headers={"x-request-id": "same"})
    assert len({request.request_id for request in engine.requests} | {"same"}) == 3


async def test_a_proxy_may_do_the_echo(engine: FakeEngine, codec: ByteCodec) -> None:
    app: FastAPI = build_app(ApiSettings("m", 10, echo_request_id=False), engine, codec)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert "x-request-id" not in (await client.get("/health")).headers
