"""The routes below /debug: what they tell, and whom."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from actors.errors import ReplicaFailed
from cluster.api.app import ApiSettings, build_app
from kvpool.directory import DirectoryError, DirectoryUnavailable, LogGap
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.api.conftest import ADMIN_KEY
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import CLEAN_CHECK, EXPLAINED, ROUTING, FakeEngine

STATE, DIRECTORY, ROUTE = "/debug/state", "/debug/directory", "/debug/route"
ROUTES = [STATE, DIRECTORY]
KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
WRONG_KEYS = ["", "Bearer", "Bearer wrong", f"Basic {ADMIN_KEY}", ADMIN_KEY, "Bearer \u00e9"]


async def test_state(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.report = ROUTING
    body = (await client.get(STATE, headers=KEY)).json()
    assert body["replicas"][0]["blocks"] == {"free": 8}
    assert body["replicas"][0]["publisher"]["state"] == "open"
    assert body["routing"] == ROUTING
    assert body["asyncio_tasks"] >= 1


async def test_state_of_a_client_without_a_router(client: httpx.AsyncClient) -> None:
    assert (await client.get(STATE, headers=KEY)).json()["routing"] == {}


async def test_directory(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.report = ROUTING
    differing = {"place": "i0", "missing": 0, "phantom": 1, "examples": ["00" * 16]}
    engine.checks = [CLEAN_CHECK, CLEAN_CHECK | {"pool": "p1", "places": [differing]}]
    response = await client.get(DIRECTORY, headers=KEY)
    assert response.status_code == 200
    assert response.json() == {"pools": engine.checks, "state": "live"}


@pytest.mark.parametrize("error", [DirectoryUnavailable("Redis is away"), LogGap("Redis is away")])
async def test_directory_that_does_not_answer(
    client: httpx.AsyncClient, engine: FakeEngine, error: DirectoryError
) -> None:
    engine.report, engine.checks = ROUTING, error
    told = error_of(await client.get(DIRECTORY, headers=KEY), 503)
    assert (told["message"], told["code"]) == ("Redis is away", "directory_unavailable")


async def test_a_check_that_takes_too_long(engine: FakeEngine, codec: ByteCodec) -> None:
    engine.report, engine.check_delay_s = ROUTING, 60
    app = build_app(ApiSettings("m", 10, admin_key=ADMIN_KEY, check_timeout_s=0.02), engine, codec)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        told = error_of(await client.get(DIRECTORY, headers=KEY), 503)
    assert told["code"] == "directory_unavailable"
    assert "0.02 s" in told["message"]


@pytest.mark.parametrize("report", [{}, ROUTING | {"directory": ROUTING["directory"] | {"state": "off"}}])
async def test_no_directory_says_how_to_get_one(
    client: httpx.AsyncClient, engine: FakeEngine, report: dict[str, Any]
) -> None:
    engine.report = report
    told = error_of(await client.get(DIRECTORY, headers=KEY), 409)
    assert told["code"] == "directory_not_configured"
    assert "directory.redis_url" in told["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", WRONG_KEYS)
async def test_the_key_is_needed(client: httpx.AsyncClient, engine: FakeEngine, path: str, value: str) -> None:
    engine.report = ROUTING
    headers = [(b"authorization", value.encode("latin-1"))] if value else []
    response = await client.get(path, headers=headers)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ROUTES)
async def test_without_a_key_there_is_no_such_route(engine: FakeEngine, codec: ByteCodec, path: str) -> None:
    app = build_app(ApiSettings("m", 10), engine, codec)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for key in ("", "x"):
            response = await client.get(path, headers={"authorization": f"Bearer {key}"})
            assert error_of(response, 404)["code"] == "unknown_url"


@pytest.mark.parametrize("path", ROUTES)
async def test_methods_and_schema(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    engine.report = ROUTING
    for method in ("PUT", "DELETE", "POST"):
        response = await client.request(method, path, headers=KEY)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "GET, HEAD, OPTIONS"
    assert (await client.options(path)).status_code == 204
    head = await client.head(path, headers=KEY)
    assert (head.status_code, head.content) == (200, b"")
    assert (await client.head(path)).status_code == 401
    assert path not in (await client.get("/openapi.json")).json()["paths"]


def test_the_key_is_not_in_the_settings_text() -> None:
    assert "sesame" not in repr(ApiSettings("m", 10, admin_key="sesame"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(max_tokens=7, cache_salt="salt", stream=True)),
        (CHAT, chat_body(messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}])),
        (COMPLETIONS, completion_body()),
        (COMPLETIONS, completion_body(prompt=[1, 2, 3], max_tokens=9)),
        (COMPLETIONS, completion_body(prompt=["one"])),
        (COMPLETIONS, completion_body(prompt="x" * 100, cache_salt="salt")),
    ],
)
async def test_what_is_explained_is_what_would_be_sent(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(ROUTE, json=body, headers=KEY)
    assert (answer.status_code, answer.json()) == (200, EXPLAINED)
    assert engine.requests == [], "nothing is sent"
    assert (await client.post(path, json=body)).status_code == 200
    (asked,), (sent,) = engine.explained, engine.requests
    assert asked.prompt_token_ids == sent.prompt_token_ids
    assert (asked.salt, asked.session) == (sent.salt, sent.session)
    assert asked.sampling.max_tokens == sent.sampling.max_tokens


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_body(messages=[])),
    (CHAT, chat_body(model="another")),
    (CHAT, chat_body(temperature="hot")),
    (CHAT, chat_body(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])),
    (CHAT, chat_body(messages=[{"role": "user", "content": "x" * 4000}])),
    (COMPLETIONS, completion_body(prompt="")),
    (COMPLETIONS, completion_body(prompt=[1, 99_999])),
    (COMPLETIONS, completion_body(prompt="x" * 128)),
    (COMPLETIONS, completion_body(suffix="x")),
    (COMPLETIONS, {"model": "org/tiny"}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_what_would_be_refused_is_refused_alike(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    served, explained = await client.post(path, json=body), await client.post(ROUTE, json=body, headers=KEY)
    assert 400 <= served.status_code < 500
    assert error_of(explained, served.status_code) == error_of(served, served.status_code)
    assert engine.explained == []


async def test_one_prompt_at_a_time(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(ROUTE, json=completion_body(prompt=["a", "b"]), headers=KEY)
    told = error_of(answer, 400)
    assert told["param"] == "prompt"
    assert "one at a time" in told["message"]
    assert engine.explained == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
async def test_a_body_that_is_no_object(client: httpx.AsyncClient, content: bytes) -> None:
    error_of(await client.post(ROUTE, content=content, headers=KEY), 400)


async def test_no_replica_to_choose_from(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.explanation = ReplicaFailed("No replica is available: see `kvatlas status`.")
    error_of(await client.post(ROUTE, json=chat_body(), headers=KEY), 503)


@pytest.mark.parametrize("value", WRONG_KEYS)
async def test_an_explanation_needs_the_key(client: httpx.AsyncClient, engine: FakeEngine, value: str) -> None:
    headers = [(b"authorization", value.encode("latin-1"))] if value else []
    error_of(await client.post(ROUTE, json=chat_body(), headers=headers), 401)
    # The body of somebody without the key is not even read.
    error_of(await client.post(ROUTE, content=b"x" * 200_000, headers=headers), 401)
    assert engine.explained == []


async def test_without_a_key_nothing_is_explained(engine: FakeEngine, codec: ByteCodec) -> None:
    app = build_app(ApiSettings("org/tiny", 128), engine, codec)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        told = error_of(await client.post(ROUTE, json=chat_body(), headers={"authorization": "Bearer "}), 404)
    assert told["code"] == "unknown_url"


async def test_methods_of_the_explanation(client: httpx.AsyncClient) -> None:
    for method in ("GET", "PUT", "DELETE"):
        response = await client.request(method, ROUTE, headers=KEY)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "OPTIONS, POST"
    assert (await client.options(ROUTE)).status_code == 204
    assert ROUTE not in (await client.get("/openapi.json")).json()["paths"]
