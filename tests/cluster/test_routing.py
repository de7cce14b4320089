"""An ingress is connected to its replicas, with a directory and without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from actors.config import DirectoryConfig, Membership
from cluster.routing import Routing, RoutingSettings
from router import registry
from tests.fakes.engine import READY

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
