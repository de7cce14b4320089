"""Liveness and readiness."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from actors.status import ReplicaStatus
from tests.api.calls import error_of
from tests.fakes.engine import READY, ROUTING, FakeEngine

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


@pytest.mark.parametrize("path", READY_ROUTES)
@pytest.mark.parametrize("state", ["live", "stale", "silent", "off"])
async def test_a_directory_that_is_down_is_told_and_no_reason_to_leave(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, state: str
) -> None:
    engine.report = ROUTING | {"directory": ROUTING["directory"] | {"state": state}}
    response = await client.get(path)
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "replicas": 1, "directory": state}


@pytest.mark.parametrize("path", READY_ROUTES)
async def test_without_a_router_nothing_is_said_of_a_directory(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).json() == {"status": "ok", "replicas": 1}
