"""An ingress is connected to its replicas, with a directory and without."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from actors.config import DirectoryConfig, Membership
from cluster.routing import Routing, RoutingSettings
from router import registry
from router.route_config import RouteConfig
from tests.fakes.engine import READY
from tests.fakes.redis_server import RedisServer, find_binary

MEMBER = Membership("c1", bytes(32), 2)


class Handle:
    """The part of a `DeploymentHandle` that is needed before the first request."""

    deployment_name = "engine-of-a-test"

    def options(self, **options: Any) -> Handle:
        return self


@pytest.fixture
def connect() -> Iterator[Callable[[RoutingSettings], Routing]]:
    """Makes routings over a handle that is never used; they are closed in the end."""
    made: list[Routing] = []

    def build(settings: RoutingSettings) -> Routing:
        made.append(Routing(cast("Any", Handle()), "tiny", settings, READY))
        return made[-1]

    yield build
    for routing in made:
        routing.close()
    assert registry.find(Handle.deployment_name) is None
    assert ours() == []


def ours() -> list[str]:
    """The names of the threads that a routing starts."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvatlas-")]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_without_a_directory_it_routes_by_load_and_says_so(
    connect: Callable[[RoutingSettings], Routing], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        client = connect(RoutingSettings(MEMBER)).client
    assert "directory.redis_url" in caplog.text
    report = client.routing()
    assert (report["directory"]["state"], report["policy"]) == ("off", "cost")
    service = registry.find(Handle.deployment_name)
    assert service is not None
    assert service.route("r", ["a", "b"]).outcome == "fallback"
    assert await client.check_directory() == []
    assert report["sharing"] is None
    assert ours() == []


async def test_a_directory_that_is_down_is_followed_until_it_comes(
    connect: Callable[[RoutingSettings], Routing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.membership.joined", lambda member: member)
    settings = RoutingSettings(MEMBER, DirectoryConfig("redis://:hidden@127.0.0.1:1/0"))
    with caplog.at_level(logging.DEBUG):
        client = connect(settings).client
        await asyncio.sleep(0.3)
    assert client.routing()["directory"]["state"] in ("stale", "silent")
    assert "hidden" not in caplog.text
    assert "hidden" not in repr(settings)


@pytest.mark.redis
async def test_two_ingresses_know_each_others_bookings_until_one_goes(
    connect: Callable[[RoutingSettings], Routing], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cluster.membership.joined", lambda member: member)
    binary = find_binary()
    assert binary is not None
    server = RedisServer(binary, tmp_path)
    server.start()
    try:
        settings = RoutingSettings(MEMBER, DirectoryConfig(server.url))
        one = connect(settings)
        first = registry.find(Handle.deployment_name)
        two = connect(settings)
        assert first is not None
        await until(lambda: two.client.routing()["sharing"]["routers"] == 1)
        with first.ticket("r", [bytes(16)], 20, 5):
            first.route("r", ["a"])
            await until(lambda: two.client.routing()["remote_bookings"] == 1)
        await until(lambda: two.client.routing()["remote_bookings"] == 0)
        with first.ticket("s", [bytes(16)], 20, 5):
            first.route("s", ["a"])
            await until(lambda: two.client.routing()["remote_bookings"] == 1)
            one.close()
            await until(lambda: two.client.routing()["remote_bookings"] == 0)
        assert two.client.routing()["sharing"]["routers"] == 0
        two.close()
    finally:
        server.stop()


@pytest.mark.parametrize("broken", ["RedisReader", "RedisExchange", "RedisClaimStore", "PrefixKeys"])
async def test_what_was_started_ends_when_the_rest_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr("cluster.membership.joined", lambda member: member)

    def fail(*args: Any, **options: Any) -> Any:
        raise ValueError("cannot be built")

    home = {"RedisReader": "kvpool.directory.redis_backend", "PrefixKeys": "cluster.routing"}
    monkeypatch.setattr(f"{home.get(broken, 'kvpool.directory.redis_exchange')}.{broken}", fail)
    settings = RoutingSettings(MEMBER, DirectoryConfig("redis://127.0.0.1:1/0"), RouteConfig())
    with pytest.raises(ValueError, match="cannot be built"):
        Routing(cast("Any", Handle()), "tiny", settings, READY)
    assert ours() == []
    assert registry.find(Handle.deployment_name) is None
