"""Our router inside Serve's own machinery, without a cluster: replicas are scripted, everything between is Ray's code."""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from router import registry, serve_router
from router.serve_router import PrefixRouter
from tests.router.scene import Scene, keys

DEPLOYMENT = DeploymentID("Engine", "app")


class Replica:
    """A replica that Serve knows. The test fails when it is asked for its queue length, unless it `may_be_asked`."""

    def __init__(self, name: str, max_ongoing_requests: int = 100) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.actor_id = name
        self.node_id = "node"
        self.availability_zone = None
        self.multiplexed_model_ids: set[str] = set()
        self.max_ongoing_requests = max_ongoing_requests
        self.may_be_asked = False
        self.queue_len: int | None = 0
        self.asked = 0
        self.was_disturbed = False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        # Serve swallows what is raised here: it is noted, and the fixture looks at it.
        self.was_disturbed |= not self.may_be_asked
        if self.queue_len is None:
            raise TimeoutError
        return self.queue_len


class Cluster:
    """The router of one process, its service, and replicas."""

    def __init__(self, scene: Scene, kind: type[PrefixRouter] = PrefixRouter) -> None:
        self.scene = scene
        self.router = kind(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            self_actor_id="actor",
            use_replica_queue_len_cache=True,
            initial_backoff_s=0.001,
            max_backoff_s=0.005,
            create_replica_wrapper_func=lambda info: info,
        )
        self.router.initialize_state()  # type: ignore[no-untyped-call]
        self.replicas: dict[str, Replica] = {}
        self.serial = 0

    async def add(self, *names: str, max_ongoing_requests: int = 100) -> None:
        """New replicas. Serve asks each of them once; then its cache forgets what they said."""
        for name in names:
            self.replicas[name] = Replica(name, max_ongoing_requests)
        await self.set(*self.replicas)
        for replica in self.replicas.values():
            self.router.replica_queue_len_cache.invalidate_key(replica.replica_id)

    async def set(self, *names: str) -> None:
        """These are the replicas now."""
        for replica in self.replicas.values():
            replica.may_be_asked = True
        self.router.update_replicas([self.replicas[name] for name in names])  # type: ignore[misc]
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        for replica in self.replicas.values():
            replica.may_be_asked, replica.asked = False, 0

    def request(self, request_id: str = "q", method: str = "generate", args: list[Any] | None = None) -> PendingRequest:
        self.serial += 1
        metadata = RequestMetadata(request_id="client's", internal_request_id=f"i{self.serial}", call_method=method)
        return PendingRequest(
            args=[SimpleNamespace(request_id=request_id)] if args is None else args, kwargs={}, metadata=metadata
        )

    async def choose(self, request: PendingRequest, is_retry: bool = False) -> str:
        """What Serve makes of our ranks."""
        chosen = await asyncio.wait_for(self.router._choose_replica_for_request(request, is_retry=is_retry), 5)
        return chosen.replica_id.unique_id

    async def ranks(self, request: PendingRequest | None, names: tuple[str, ...] = ()) -> list[list[str]]:
        """Our ranks."""
        candidates: Any = [self.replicas[name] for name in names or self.replicas]
        ranks = await self.router.choose_replicas(candidate_replicas=candidates, pending_request=request)
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


@pytest.fixture
def scene() -> Iterator[Scene]:
    """r1 holds the keys 1 to 4; five replicas are heard."""
    made = Scene()
    for name in ("r0", "r1", "r2", "r3", "r4"):
        made.hear(name, held=[1, 2, 3, 4] if name == "r1" else [])
    registry.install("Engine", made.service)
    yield made
    registry.remove("Engine")
    assert made.service.report()["bookings"] == 0
    assert made.service._tickets == {}


@pytest.fixture
async def cluster(scene: Scene) -> AsyncIterator[Cluster]:
    """Fails when a routing task is left behind."""
    made = Cluster(scene)
    yield made
    await asyncio.sleep(0.02)
    assert made.router.curr_num_routing_tasks == 0
    assert made.router.num_pending_requests == 0
    assert len(asyncio.all_tasks()) == 1
    assert not [name for name, replica in made.replicas.items() if replica.was_disturbed]


async def test_the_request_goes_where_its_prefix_is_and_nobody_is_asked(cluster: Cluster) -> None:
    await cluster.add("r0", "r1", "r2")
    request = cluster.request()
    with cluster.scene.service.ticket("q", keys(1, 2, 3), 100, 16) as ticket:
        assert await cluster.choose(request) == "r1"
        cluster.router.on_request_routed(request, cluster.replicas["r1"].replica_id, None)  # type: ignore[arg-type]
        assert cluster.scene.service.requests("r1") == 1
        assert ticket.decision is not None
        assert ticket.decision.outcome == "prefix_hit"
    assert request.kwargs == {"predicted_tokens": 48}
    assert request.routing_context.should_backoff
    await asyncio.sleep(0.01)
    assert [replica.asked for replica in cluster.replicas.values()] == [0, 0, 0]


async def test_three_ranks_of_one_then_the_rest(cluster: Cluster) -> None:
    await cluster.add("r0", "r1", "r2", "r3", "r4")
    with cluster.scene.service.ticket("q", keys(1), 100, 16):
        ranks = await cluster.ranks(cluster.request())
        assert [len(rank) for rank in ranks] == [1, 1, 1, 2]
        assert ranks[0] == ["r1"]
        assert sorted(itertools.chain(*ranks)) == sorted(cluster.replicas)
        for count in (1, 2, 3):
            names = ("r4", "r0", "r1")[:count]
            assert [len(rank) for rank in await cluster.ranks(cluster.request(), names)] == [1] * count


async def test_only_candidates_are_ranked_and_all_of_them(cluster: Cluster) -> None:
    await cluster.add("r0", "r1", "new")
    with cluster.scene.service.ticket("q", keys(1), 100, 16):
        assert await cluster.ranks(cluster.request(), ("new", "r0")) == [["r0"], ["new"]]


async def test_a_service_that_forgets_or_invents_replicas(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.add("r0", "r1")
    monkeypatch.setattr(
        cluster.scene.service, "route", lambda *args: SimpleNamespace(ranking=["ghost", "r1"], predicted_tokens=0)
    )
    assert await cluster.ranks(cluster.request()) == [["r1"], ["r0"]]


async def test_no_candidates(cluster: Cluster) -> None:
    for request in (None, cluster.request(), cluster.request(method="status")):
        assert not list(itertools.chain(*await cluster.ranks(request)))


async def test_other_methods_and_requests_of_others_are_left_to_serve(cluster: Cluster) -> None:
    await cluster.add("r0", "r1")
    assert await cluster.ranks(None) == [["r0", "r1"]]
    request = cluster.request(method="status", args=[])
    assert await cluster.ranks(request) == [["r0", "r1"]]
    assert (request.kwargs, request.routing_context.should_backoff) == ({}, True)
    assert sum(cluster.scene.service.report()["decisions"].values()) == 0
    request = cluster.request("nobody's")
    assert len(await cluster.ranks(request)) == 2
    assert request.kwargs == {"predicted_tokens": 0}
    assert cluster.scene.service.report()["decisions"]["fallback"] == 1


async def test_without_a_service_the_shortest_queue_wins(cluster: Cluster) -> None:
    await cluster.add("r0", "r1")
    registry.remove("Engine")
    request = cluster.request()
    assert await cluster.ranks(request) == [["r0", "r1"]]
    cluster.router.on_new_queue_len_info(cluster.replicas["r0"].replica_id, 5)
    assert await cluster.choose(cluster.request()) == "r1"
    cluster.router.on_request_routed(request, cluster.replicas["r1"].replica_id, None)  # type: ignore[arg-type]
    cluster.router.on_replica_actor_died(cluster.replicas["r1"].replica_id)
    await cluster.set("r0")


async def test_a_full_replica_is_passed_over(cluster: Cluster) -> None:
    await cluster.add("r0", "r1", max_ongoing_requests=2)
    full = cluster.replicas["r1"]
    full.may_be_asked, full.queue_len = True, 2
    cluster.router.on_new_queue_len_info(full.replica_id, 2)
    with cluster.scene.service.ticket("q", keys(1, 2), 100, 16) as ticket:
        request = cluster.request()
        assert await cluster.choose(request) == "r0"
        cluster.router.on_request_routed(request, cluster.replicas["r0"].replica_id, None)  # type: ignore[arg-type]
        assert ticket.decision is not None
        assert (ticket.decision.replica_id, ticket.decision.outcome) == ("r0", "load_override")


async def test_when_all_are_full_it_waits_and_then_goes_on(cluster: Cluster) -> None:
    await cluster.add("r0", "r1", max_ongoing_requests=1)
    for replica in cluster.replicas.values():
        replica.may_be_asked, replica.queue_len = True, 1
        cluster.router.on_new_queue_len_info(replica.replica_id, 1)
    with cluster.scene.service.ticket("q", keys(1), 100, 16):
        waiting = asyncio.create_task(cluster.choose(cluster.request()))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        assert cluster.scene.service.report()["bookings"] == 1  # decided many times, booked once
        cluster.replicas["r0"].queue_len = 0
        assert await waiting == "r0"
    with cluster.scene.service.ticket("q", keys(1), 100, 16):
        cluster.replicas["r0"].queue_len = 1
        for replica in cluster.replicas.values():
            cluster.router.on_new_queue_len_info(replica.replica_id, 1)
        leaving = asyncio.create_task(cluster.choose(cluster.request()))
        await asyncio.sleep(0.01)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    # Serve forgets a request that left when the next one comes.
    cluster.replicas["r0"].queue_len = 0
    with cluster.scene.service.ticket("q", keys(1), 100, 16):
        await cluster.choose(cluster.request())


async def test_our_own_bookings_never_make_a_replica_look_full(cluster: Cluster) -> None:
    await cluster.add("r1", max_ongoing_requests=2)
    tickets = [cluster.scene.service.ticket(f"q{number}", [], 10, 16) for number in range(5)]
    for number in range(5):
        assert await cluster.choose(cluster.request(f"q{number}")) == "r1"
        cluster.router.replica_queue_len_cache.invalidate_key(cluster.replicas["r1"].replica_id)
    for ticket in tickets:
        ticket.close()


async def test_a_replica_that_serve_could_not_reach_is_asked_first(cluster: Cluster) -> None:
    await cluster.add("r0", "r1")
    lost = cluster.replicas["r1"]
    cluster.router.on_replica_actor_unavailable(lost.replica_id)
    lost.may_be_asked, lost.queue_len = True, None
    with cluster.scene.service.ticket("q", keys(1, 2), 100, 16):
        assert await cluster.choose(cluster.request()) == "r0"
    assert lost.asked == 1
    lost.queue_len = 0
    with cluster.scene.service.ticket("q", keys(1, 2), 100, 16):
        assert await cluster.choose(cluster.request()) == "r1"
    cluster.router.on_new_queue_len_info(lost.replica_id, 1)  # it took the request
    lost.may_be_asked = False
    cluster.router.replica_queue_len_cache.invalidate_key(lost.replica_id)  # as after ten quiet seconds
    cluster.scene.hear("r1")
    with cluster.scene.service.ticket("q", keys(1, 2), 100, 16):
        assert await cluster.choose(cluster.request()) == "r1"


async def test_a_replica_that_dies_while_it_is_chosen(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.add("r0", "r1", "r2")
    route, dying = cluster.scene.service.route, cluster.replicas["r1"].replica_id

    def route_and_kill(request_id: str, replica_ids: list[str]) -> Any:
        decision = route(request_id, replica_ids)
        if dying in cluster.router.curr_replicas:
            cluster.router.on_replica_actor_died(dying)
        return decision

    monkeypatch.setattr(cluster.scene.service, "route", route_and_kill)
    with cluster.scene.service.ticket("q", keys(1, 2), 100, 16):
        assert await cluster.choose(cluster.request()) in ("r0", "r2")


async def test_a_retry_after_a_death_goes_elsewhere(cluster: Cluster) -> None:
    await cluster.add("r0", "r1")
    request = cluster.request()
    with cluster.scene.service.ticket("q", keys(1, 2), 100, 16):
        assert await cluster.choose(request) == "r1"
        cluster.router.on_replica_actor_died(cluster.replicas["r1"].replica_id)
        assert cluster.scene.service.report()["bookings"] == 0
        assert await cluster.choose(request, is_retry=True) == "r0"
        assert request.kwargs == {"predicted_tokens": 0}


async def test_members_are_told(cluster: Cluster) -> None:
    await cluster.add("r0", "r1")
    with cluster.scene.service.ticket("q", keys(1), 100, 16):
        assert await cluster.choose(cluster.request()) == "r1"
        await cluster.set("r0")
        assert cluster.scene.service.report()["bookings"] == 0


@pytest.mark.parametrize("broken", ["route", "routed", "died", "members", "requests", "route_failed"])
async def test_whatever_breaks_the_request_is_routed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    await cluster.add("r0", "r1")

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(cluster.scene.service, broken, fail)
    if broken == "route_failed":
        monkeypatch.setattr(cluster.scene.service, "route", fail)
    if broken == "requests":  # Serve has to ask then
        for replica in cluster.replicas.values():
            replica.may_be_asked = True
    with caplog.at_level(logging.WARNING, logger="router.serve_router"):
        for _ in range(2):
            request = cluster.request()
            with cluster.scene.service.ticket("q", keys(1), 100, 16) as ticket:
                assert await cluster.choose(request) in ("r0", "r1")
                cluster.router.on_request_routed(request, cluster.replicas["r0"].replica_id, None)  # type: ignore[arg-type]
                if broken == "route":
                    assert "predicted_tokens" not in request.kwargs
                    assert ticket.decision is not None
                    assert ticket.decision.outcome == "fallback"
        await cluster.set("r0", "r1")
        cluster.router.on_replica_actor_died(cluster.replicas["r1"].replica_id)
        ours = [record for record in caplog.records if record.name == "router.serve_router"]
        assert len(ours) == 1, "once a minute"
    if broken == "route":
        assert cluster.scene.service.report()["decisions"]["fallback"] == 2


async def test_a_request_that_is_none(cluster: Cluster) -> None:
    """Called with arguments that `generate` does not know: the replica will say so, not the router."""
    await cluster.add("r0", "r1")
    for args in ([], ["text"], [None]):
        request = cluster.request(args=args)
        assert await cluster.choose(request) in ("r0", "r1")
        cluster.router.on_request_routed(request, cluster.replicas["r0"].replica_id, None)  # type: ignore[arg-type]
    assert cluster.scene.service.report()["decisions"]["fallback"] == 3


async def test_a_registry_that_cannot_be_imported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.add("r0", "r1")
    monkeypatch.delattr(registry, "find")
    for replica in cluster.replicas.values():
        replica.may_be_asked = True
    assert await cluster.choose(cluster.request()) in ("r0", "r1")


async def test_pickled_by_value_as_serve_does_it_still_finds_the_service(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloudpickle.register_pickle_by_value(serve_router)
    try:
        pickled = cloudpickle.dumps(PrefixRouter)
        # Another process would not recognise it as a class that it has already.
        tracked: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
        monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", tracked)
        kind = cloudpickle.loads(pickled)
    finally:
        cloudpickle.unregister_pickle_by_value(serve_router)
    assert kind is not PrefixRouter
    cluster = Cluster(scene, kind)
    await cluster.add("r0", "r1")
    with scene.service.ticket("q", keys(1, 2), 100, 16):
        assert await cluster.choose(cluster.request()) == "r1"
    await asyncio.sleep(0.01)


async def test_many_requests_at_once_are_all_routed_and_spread(cluster: Cluster) -> None:
    await cluster.add("r0", "r1", "r2", "r3", "r4")
    tickets = [cluster.scene.service.ticket(f"q{number}", keys(100 + number), 100, 16) for number in range(50)]
    chosen = await asyncio.gather(*(cluster.choose(cluster.request(f"q{number}")) for number in range(50)))
    assert {name: chosen.count(name) for name in cluster.replicas} == dict.fromkeys(cluster.replicas, 10)
    for ticket in tickets:
        ticket.close()
