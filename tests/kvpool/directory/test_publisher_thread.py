from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.directory import PoolLoad, Space
from kvpool.directory.memory import MemoryReader, MemoryServer, MemoryWriter
from kvpool.directory.messages import split_keys
from kvpool.directory.publisher import Publisher
from kvpool.directory.publisher_thread import PublisherThread
from tests.fakes.published_pool import Role
from tests.kvpool.conftest import Rig

SPACE = Space("c", "ab" * 8, 2)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def start(
    rig: Rig,
    server: MemoryServer,
    load: Callable[[], PoolLoad] = PoolLoad,
    may_open: Callable[[], bool] = lambda: True,
    standby_s: float = 0.1,
) -> PublisherThread:
    control, writer = rig.region.control(), MemoryWriter(server, SPACE)
    publisher = Publisher(
        control,
        "pool-0",
        rig.region.incarnation,
        writer,
        load=load,
        clock=time.monotonic,
        rng=random.Random(2),
        may_open=may_open,
    )
    return PublisherThread(publisher, writer, control, standby_s=standby_s)


def test_it_follows_the_pool_until_closed(rig: Rig) -> None:
    server = MemoryServer(random.Random(1))
    reader = MemoryReader(server, SPACE)
    thread = start(rig, server)
    wait_for(lambda: thread.stats().state == "open")
    for number in range(0, 40, 2):
        rig.cache([number, number + 1])
    wait_for(lambda: thread.stats().keys_added - thread.stats().keys_removed == 8 and thread.stats().lag_s < 0.1)
    time.sleep(0.02)
    assert thread.stats().published_blocks == 8
    thread.close()
    thread.close()
    assert not thread.alive
    assert thread.failure is None
    assert reader.pools() == []


def test_without_a_goodbye_the_directory_keeps_it(rig: Rig) -> None:
    server = MemoryServer(random.Random(1))
    rig.cache([1, 2])
    thread = start(rig, server)
    wait_for(lambda: thread.stats().published_blocks == 1 and thread.stats().state == "open")
    thread.close(goodbye=False)
    assert len(MemoryReader(server, SPACE).pools()) == 1
    stored = MemoryReader(server, SPACE).snapshot("pool-0")
    assert stored is not None
    assert set(split_keys(stored.snapshot.keys)) <= set(rig.keys([1, 2]))


def test_one_that_stands_by_is_stepped_now_and_then(rig: Rig) -> None:
    role, asked = Role(), threading.Semaphore(0)
    role.ask("somebody else")

    def may_open() -> bool:
        asked.release()
        return role.ask("this one")

    server = MemoryServer(random.Random(1))
    thread = start(rig, server, may_open=may_open, standby_s=60.0)
    assert asked.acquire(timeout=10)
    assert not asked.acquire(timeout=0.2), "it was stepped as if it had something to publish"
    thread.close()
    thread = start(rig, server, may_open=may_open, standby_s=0.001)
    wait_for(lambda: thread.stats().state == "standby")
    role.free()
    wait_for(lambda: thread.stats().state == "open")
    thread.close()


def test_a_bug_ends_the_thread_and_is_told(rig: Rig) -> None:
    told: list[BaseException] = []

    def broken() -> PoolLoad:
        raise ZeroDivisionError

    server = MemoryServer(random.Random(1))
    control, writer = rig.region.control(), MemoryWriter(server, SPACE)
    publisher = Publisher(
        control,
        "pool-0",
        1,
        writer,
        load=broken,
        clock=time.monotonic,
        rng=random.Random(2),
    )
    thread = PublisherThread(publisher, writer, control, on_failure=told.append)
    wait_for(lambda: not thread.alive)
    assert isinstance(thread.failure, ZeroDivisionError)
    assert told == [thread.failure]
    thread.close()
    assert not any(other.name == "kvatlas-publisher" for other in threading.enumerate())


def test_the_pool_may_be_closed_after_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 8, 2)
    thread = start(rig, MemoryServer(random.Random(1)))
    thread.close()
    rig.close()
    assert rig.region.closed
