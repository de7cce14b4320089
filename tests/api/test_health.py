"""Liveness, readiness and the debug route."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from actors.status import ReplicaStatus
from cluster.api.app import ApiSettings, build_app
from tests.api.calls import error_of
from tests.api.conftest import ADMIN_KEY
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import READY, FakeEngine

READY_ROUTES = ["/health", "/health/ready"]


@pytest.mark.parametrize("path", [*READY_ROUTES, "/health/live", "/version"])
async def test_healthy(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("path", READY_ROUTES)
@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([], "no replica"),
        ([READY, replace(READY, replica_id="r1", stalled_s=12.5)], "r1 has made no progress for 12.5 s"),
        ([replace(READY, integrity="block 3 is lost")], "block 3 is lost"),
    ],
)
async def test_not_ready(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, statuses: list[ReplicaStatus], words: str
) -> None:
    engine.statuses = statuses
    error = error_of(await client.get(path), 503)
    assert words in error["message"]
    assert error["code"] == "not_ready"
    assert (await client.get("/health/live")).status_code == 200


async def test_replicas_that_do_not_answer_are_not_ready(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.status_delay_s = 60
    error_of(await client.get("/health"), 503)
    assert (await client.get("/health/live")).status_code == 200


async def test_debug_state(client: httpx.AsyncClient) -> None:
    response = await client.get("/debug/state", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    body = response.json()
    assert body["replicas"][0]["blocks"] == {"free": 8}
    assert body["asyncio_tasks"] >= 1


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", f"Basic {ADMIN_KEY}", ADMIN_KEY, "Bearer \u00e9"])
async def test_debug_state_needs_the_key(client: httpx.AsyncClient, value: str) -> None:
    headers = [(b"authorization", value.encode("latin-1"))] if value else []
    response = await client.get("/debug/state", headers=headers)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


async def test_without_a_key_there_is_no_debug_route(engine: FakeEngine, codec: ByteCodec) -> None:
    app = build_app(ApiSettings("m", 10), engine, codec)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for key in ("", "x"):
            response = await client.get("/debug/state", headers={"authorization": f"Bearer {key}"})
            assert error_of(response, 404)["code"] == "unknown_url"


def test_the_key_is_not_in_the_settings_text() -> None:
    assert "sesame" not in repr(ApiSettings("m", 10, admin_key="sesame"))
