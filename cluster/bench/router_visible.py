"""From a sealed block in one process to a mirror in another, over a Redis on this machine's loopback; and what that costs Redis.

    child       pool -> publisher -> Redis -> follower -> mirror       here
    requests    ticket, decision, first token, end; told to a second router through the same Redis

Each request is one prompt that the child seals at about the time at which a router here handles it, so what Redis does
meanwhile, for batches, heartbeats, mirrors and bookings, divided by the requests, is what a request costs it. Redis counts
commands inside scripts as well; bytes are those of its sockets, in and out.

Blind time: a fresh mirror reads the snapshot of a pool, from the first connection until it has all keys.

Limits: the clock is one that all processes of a machine share. With two cores, publisher, Redis, mirror and router wait for
each other, and that is in the figures.
"""

from __future__ import annotations

import contextlib
import random
import re
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from cluster.bench.pool_process import ANSWER_S, LEAD_S, BenchFailed, Worker
from cluster.bench.pool_run import regions
from cluster.bench.router_plan import BLOCK_TOKENS, Plan
from cluster.bench.router_scene import Silent, random_keys
from cluster.bench.router_worker import REPLICA_ID
from cluster.bench.server import signals_as_interrupts
from cluster.embedded_redis import EmbeddedRedis
from kvpool import DEFAULT_DIRECTORY
from kvpool.directory import Batch, Heartbeat, LogEntry, ReplicaLoad, Snapshot, Space, Writer
from kvpool.directory.digest import digest_of
from kvpool.directory.messages import split_keys
from kvpool.directory.redis_backend import RedisReader, RedisWriter
from kvpool.directory.redis_exchange import RedisExchange
from router.follower import Follower, FollowerThread
from router.mirror import Mirror
from router.outbox import Outbox
from router.route_config import RouteConfig
from router.service import RouteService
from router.sharing import Sharing, new_origin

BLOCKS: Final = 4
"""Blocks of each prompt that is sealed: it takes one batch."""
BLINDS: Final = 5
SPACE: Final = Space("bench", "be" * 16, BLOCK_TOKENS)
HOST: Final = "127.0.0.1"

Say = Callable[[str], None]


class TimedMirror(Mirror):
    """A mirror that notes when it had each key: `seen`, monotonic ns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[bytes, int] = {}

    def apply(self, entry: LogEntry, now: float) -> None:
        """See `Mirror.apply`."""
        super().apply(entry, now)
        if isinstance(entry.message, Batch):
            at_ns = time.monotonic_ns()
            self.seen.update(dict.fromkeys(split_keys(entry.message.added), at_ns))


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """Runs it, with a Redis and a region of its own, and returns its part of the report. Raises BenchFailed, ServeFailed."""
    with (
        signals_as_interrupts(),
        tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as home,
        EmbeddedRedis(Path(home), HOST) as server,
        regions(DEFAULT_DIRECTORY) as name,
    ):
        say(f"{plan.visible_s:g} s of {plan.batches_per_s:g} batches a second over Redis")
        told = _visible(plan, server.url, name)
        say(f"{BLINDS} times a new mirror, a snapshot of {plan.blind_keys} keys")
        told["blind_ms"] = _blind_ms(plan, server.url)
        return told


def _visible(plan: Plan, url: str, name: str) -> dict[str, Any]:
    mirror = TimedMirror()
    count = int(plan.batches_per_s * plan.visible_s)
    with contextlib.ExitStack() as parts:
        child = parts.enter_context(Worker(None, "cluster.bench.router_worker"))
        where = {"directory": str(DEFAULT_DIRECTORY), "name": name, "blocks": (count + 8) * BLOCKS}
        child.ask("publish", url=url, cluster_id=SPACE.cluster_id, fingerprint=SPACE.model_fingerprint, **where)
        router = parts.enter_context(_router(url, mirror))
        parts.enter_context(_router(url, Mirror()))
        _until(lambda: bool(mirror.pools(time.monotonic())), "The mirror did not see the pool")
        before = redis_stats(url)
        start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
        stop_ns = start_ns + int(plan.visible_s * 1e9)
        child.send("seal", start_ns=start_ns, stop_ns=stop_ns, per_s=plan.batches_per_s, blocks=BLOCKS)
        handled = _requests(router, start_ns, stop_ns, plan.batches_per_s)
        sealed = child.answer(ANSWER_S)["sealed"]
        after = redis_stats(url)
        wanted = {bytes.fromhex(key): at_ns for key, at_ns in sealed}
        _until(lambda: wanted.keys() <= mirror.seen.keys(), "The mirror did not see all blocks that were sealed")
        child.ask("close")
    waits_ms = sorted((mirror.seen[key] - at_ns) / 1e6 for key, at_ns in wanted.items())
    used = {field: after[field] - before[field] for field in after}
    return {
        "visible_p50_ms": statistics.median(waits_ms),
        "visible_p99_ms": waits_ms[min(len(waits_ms) - 1, int(0.99 * len(waits_ms)))],
        "visible_batches": len(waits_ms),
        "redis_ops_per_request": used["total_commands_processed"] / handled,
        "redis_bytes_per_request": (used["total_net_input_bytes"] + used["total_net_output_bytes"]) / handled,
    }


@contextlib.contextmanager
def _router(url: str, mirror: Mirror) -> Iterator[RouteService]:
    """A router as an ingress has one: it follows the directory and shares its bookings."""
    rng, clock = random.SystemRandom(), time.monotonic
    follower = FollowerThread(RedisReader(url, SPACE), mirror, clock=clock, rng=rng)
    outbox = Outbox(new_origin(rng), clock)
    service = RouteService(
        mirror,
        RouteConfig(),
        block_tokens=BLOCK_TOKENS,
        clock=clock,
        rng=rng,
        metrics=Silent(),
        fresh_s=3.0,
        connected=lambda: follower.alive,
        announce=outbox.announce,
    )
    sharing = Sharing(lambda: RedisExchange(url, SPACE, rng), outbox, service, clock=clock, rng=rng)
    try:
        yield service
    finally:
        sharing.close()
        follower.close()


def _requests(service: RouteService, start_ns: int, stop_ns: int, per_s: float) -> int:
    """Lets the router handle a request, from its ticket to its end, at every beat; returns how many."""
    numbers = np.random.default_rng()
    handled, due_ns = 0, start_ns
    while due_ns < stop_ns:
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        tokens = BLOCKS * BLOCK_TOKENS
        with service.ticket(f"request-{handled}", random_keys(BLOCKS, numbers), tokens, 16) as ticket:
            service.route(ticket.request_id, [REPLICA_ID])
            service.routed(ticket.request_id, REPLICA_ID)
            ticket.admitted(REPLICA_ID, 0)
            ticket.started()
        handled += 1
        due_ns += int(1e9 / per_s)
    return handled


def _blind_ms(plan: Plan, url: str) -> float:
    """Median time in which a new mirror has a pool of `blind_keys` keys."""
    keys = random_keys(plan.blind_keys, np.random.default_rng())
    who = Writer("blind", secrets.randbits(64), secrets.randbits(64))
    writer = RedisWriter(url, SPACE, random.SystemRandom())
    try:
        writer.open(Snapshot(who, 0, keys, digest_of(keys)))
        writer.write(Heartbeat(who, 0, digest_of(keys), 60.0, 0, (ReplicaLoad("blind"),)))
        taken = []
        for _ in range(BLINDS):
            begin = time.perf_counter()
            mirror, reader = Mirror(), RedisReader(url, SPACE)
            try:
                Follower(reader, mirror, time.monotonic).step(0.001)
                taken.append((time.perf_counter() - begin) * 1e3)
            finally:
                reader.close()
            if len(mirror.keys("blind")) != plan.blind_keys:
                raise BenchFailed("A new mirror did not take a snapshot at its first look: please report it.")
        return statistics.median(taken)
    finally:
        writer.close()


def redis_stats(url: str) -> dict[str, int]:
    """The counters of the server at `url` (redis://:password@host:port) that are reported. Raises BenchFailed."""
    parts = urlsplit(url)
    names = ("total_commands_processed", "total_net_input_bytes", "total_net_output_bytes")
    told = b""
    try:
        with socket.create_connection((parts.hostname or HOST, parts.port or 6379), 5.0) as channel:
            channel.sendall(f"AUTH {parts.password}\r\nINFO stats\r\n".encode())
            while not all(re.search(rb"%s:\d+\r" % name.encode(), told) for name in names):
                more = channel.recv(1 << 16)
                if not more:
                    raise BenchFailed("The benchmark's Redis does not tell its counters: run it again.")
                told += more
    except OSError as error:
        raise BenchFailed(f"The benchmark's Redis does not tell its counters ({error}): run it again.") from error
    found = {name: re.search(rb"%s:(\d+)\r" % name.encode(), told) for name in names}
    return {name: int(match[1]) for name, match in found.items() if match is not None}


def _until(is_so: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise BenchFailed(f"{what} within {limit_s:g} s: try again on an idle machine.")
        time.sleep(0.005)
