"""The routes below /debug: what they tell, and whom."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.api.app import ApiSettings, build_app
from kvpool.directory import DirectoryError, DirectoryUnavailable, LogGap
from tests.api.calls import error_of
from tests.api.conftest import ADMIN_KEY
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import CLEAN_CHECK, ROUTING, FakeEngine

STATE, DIRECTORY = "/debug/state", "/debug/directory"
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
    engine.checks = [CLEAN_CHECK, CLEAN_CHECK | {"pool": "p1", "mirror_phantom": 1, "examples": ["00" * 16]}]
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
