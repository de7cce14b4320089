"""One process publishes a region that several share; another one takes over."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.publication import Publication
from kvpool import BlockGeometry, Pool, Region
from kvpool.directory import DirectoryWriter, Gone, Message, PoolLoad, ReplicaLoad, Space
from kvpool.directory.memory import MemoryReader, MemoryServer, MemoryWriter
from kvpool.directory.messages import decode
from router.follower import Follower
from router.mirror import Mirror

GEOMETRY = BlockGeometry(1, 1, 4, 2, "float32")
SPACE = Space("c1", "ab" * 16, 2)
LEASE_S = 30.0


class Scene:
    """A region with two that are attached to it, a directory, and a mirror that follows it."""

    def __init__(self, directory: Path) -> None:
        self.one = Region.create(directory, "r", GEOMETRY, 8, bytes(32), random.Random(1))
        self.two = Region.attach(self.one.path)
        self.pool = Pool.create(self.one)
        self.server = MemoryServer(random.Random(1))
        self.mirror = Mirror()
        self.follower = Follower(MemoryReader(self.server, SPACE), self.mirror, time.monotonic)
        self.stood_by = threading.Event()
        self.open: list[Publication] = []

    def publish(self, region: Region, replica_id: str, writer: DirectoryWriter | None = None) -> Publication:
        publication = Publication(
            region,
            "shared",
            writer or MemoryWriter(self.server, SPACE),
            load=lambda: PoolLoad(3, (ReplicaLoad(replica_id),)),
            stand_by=self.stood_by.set,
            lease_s=LEASE_S,
            clock=time.monotonic,
            rng=random.Random(2),
        )
        self.open.append(publication)
        return publication

    def cache(self, key: bytes) -> None:
        with self.pool.table("a") as table:
            self.pool.allocate(table, 1)
            self.pool.seal(table, 0, key, [1, 2])

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, "it does not come to pass"
            self.follower.step(0.01)

    def told_by(self) -> tuple[str, ...]:
        """The replicas that the pool's last heartbeat tells of."""
        return next((view.replica_ids for view in self.mirror.pools(time.monotonic())), ())

    def log(self) -> list[Message]:
        return [decode(data) for _, data in self.server.spaces[SPACE].log]

    def close(self) -> None:
        for publication in self.open:
            publication.close()
        self.pool.close()
        self.one.close()
        self.two.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    built = Scene(tmp_path)
    yield built
    built.close()


def state(publication: Publication) -> str:
    return str(publication.report()["state"])


def test_one_publishes_and_the_other_takes_over_when_it_leaves(scene: Scene) -> None:
    first = scene.publish(scene.one, "r1")
    scene.until(lambda: scene.told_by() == ("r1",))
    second = scene.publish(scene.two, "r2")
    assert scene.stood_by.wait(20.0)
    scene.cache(b"k" * 16)
    scene.until(lambda: scene.mirror.keys("shared") == {b"k" * 16})
    assert (state(first), state(second)) == ("open", "standby")
    first.close()
    scene.until(lambda: scene.told_by() == ("r2",))
    scene.until(lambda: scene.mirror.keys("shared") == {b"k" * 16})
    assert state(second) == "open"
    second.close()  # not the last one either: the first may open the region again
    assert not any(isinstance(message, Gone) for message in scene.log()), "the pool never left"


def test_the_last_one_takes_the_pool_out_of_the_directory(scene: Scene) -> None:
    publication = scene.publish(scene.one, "r1")
    scene.until(lambda: scene.told_by() == ("r1",))
    scene.two.close()
    publication.close()
    publication.close()
    assert isinstance(scene.log()[-1], Gone)
    scene.until(lambda: scene.mirror.pools(time.monotonic()) == [])


def test_a_thread_that_fails_gives_the_role_to_another(scene: Scene) -> None:
    class Broken(MemoryWriter):
        def open(self, snapshot: object) -> int:
            raise RuntimeError("a bug")

    first = scene.publish(scene.one, "r1", Broken(scene.server, SPACE))
    scene.until(lambda: state(first) == "ended")
    scene.publish(scene.two, "r2")
    scene.until(lambda: scene.told_by() == ("r2",))


def test_closing_after_the_region_is_harmless(scene: Scene) -> None:
    publication = scene.publish(scene.one, "r1")
    publication.close()
    scene.pool.close()
    scene.one.close()
    publication.close()
