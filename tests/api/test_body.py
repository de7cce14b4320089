"""Bodies that are not what they should be, before any field is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.api import body
from tests.api.calls import CHAT, COMPLETIONS, completion_body, error_of
from tests.fakes.engine import FakeEngine

JSON = {"content-type": "application/json"}
NOT_JSON = (b"", b"{", b"nul", b"\xff\xfe{}", b'{"a": "\xc3"}', b"\xef\xbb\xbf{}", b"{'a': 1}", b'{"a": 1} x', b"\x00")
NOT_AN_OBJECT = (b"[]", b'"x"', b"5", b"NaN", b"null")
TOO_MUCH = (b"[" * 50_000, b'{"seed": ' + b"9" * 5000 + b"}")


@pytest.mark.parametrize("content", [*NOT_JSON, *NOT_AN_OBJECT, *TOO_MUCH])
async def test_malformed_json(client: httpx.AsyncClient, content: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        error_of(await client.post(path, content=content, headers=JSON), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
async def test_wrong_content_type(client: httpx.AsyncClient, kind: str) -> None:
    error_of(await client.post(COMPLETIONS, content=b"{}", headers={"content-type": kind}), 415)


async def test_compressed_bodies_are_refused(client: httpx.AsyncClient) -> None:
    error_of(await client.post(COMPLETIONS, content=b"x", headers=JSON | {"content-encoding": "gzip"}), 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"])
async def test_right_content_types(client: httpx.AsyncClient, kind: str) -> None:
    request = client.build_request("POST", COMPLETIONS, json=completion_body(), headers={"content-type": kind})
    assert (await client.send(request)).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_body_over_the_limit(wire: httpx.AsyncClient, engine: FakeEngine, announced: bool) -> None:
    raw = b'{"prompt": "' + b"x" * 200_000 + b'"}'

    async def chunked() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 10_000):
            yield raw[start : start + 10_000]

    content = raw if announced else chunked()
    error = error_of(await wire.post(COMPLETIONS, content=content, headers=JSON), 413)
    assert error["code"] == "request_too_large"
    assert (await wire.post(COMPLETIONS, json=completion_body())).status_code == 200
    assert len(engine.requests) == 1


async def test_a_body_that_does_not_come_is_a_408(
    server_url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.05)
    where = httpx.URL(server_url)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
    writer.write(head.encode())
    async with asyncio.timeout(5):
        answer = await reader.read()  # to its end: the connection is of no use any more
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in answer
    assert engine.requests == []
