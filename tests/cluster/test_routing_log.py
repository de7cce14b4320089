"""`router.decision_log` gives an ingress a log for as long as it lives."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

from cluster.routing import Routing, RoutingSettings
from router import registry
from router.decision_log import Reading
from router.decision_record import Decided
from router.route_config import RouteConfig
from tests.cluster.test_routing import MEMBER, Handle
from tests.fakes.engine import READY


async def test_decisions_are_written_until_it_closes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "decisions.jsonl"
    settings = RoutingSettings(MEMBER, policy=RouteConfig(decision_log=str(path)))
    routing = Routing(cast("Any", Handle()), "tiny", settings, READY)
    try:
        service = registry.find(Handle.deployment_name)
        assert service is not None
        with service.ticket("r", [bytes(16)], 20, 10):
            assert service.route("r", ["a"]).replica_id == "a"
        assert routing.client.routing()["decision_log"]["path"] == str(path)
    finally:
        routing.close()
    (decided,) = Reading(path)
    assert isinstance(decided, Decided)
    assert (decided.request_id, decided.outcome, decided.unheard) == ("r", "fallback", ("a",))
    assert "kvatlas-decision-log" not in {thread.name for thread in threading.enumerate()}


async def test_there_is_none_by_default() -> None:
    routing = Routing(cast("Any", Handle()), "tiny", RoutingSettings(MEMBER), READY)
    try:
        assert "decision_log" not in routing.client.routing()
        assert "kvatlas-decision-log" not in {thread.name for thread in threading.enumerate()}
    finally:
        routing.close()
