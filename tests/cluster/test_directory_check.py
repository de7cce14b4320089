"""Three pictures of a pool that agree or not."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.directory_check import PoolCheck, compare
from kvpool.directory import DirectoryReader, DirectoryUnavailable, PoolLoad, ReplicaLoad, Space
from kvpool.directory.memory import MemoryReader, MemoryServer, MemoryWriter
from router.follower import Follower
from router.mirror import Mirror
from tests.fakes.published_pool import PublishedPool

SPACE = Space("c1", "ab" * 16, 2)


class Scene:
    """A published pool of replica r1, its directory, and a mirror that follows it."""

    def __init__(self, directory: Path) -> None:
        self.server = MemoryServer(random.Random(1))
        self.pool = PublishedPool(directory, MemoryWriter(self.server, SPACE), name="node-1")
        self.pool.load = PoolLoad(16, (ReplicaLoad("r0"), ReplicaLoad("r1")))
        self.mirror = Mirror()
        self.follower = Follower(self.reader(), self.mirror, time.monotonic)
        self.follow()  # so that the first heartbeat is one it hears

    def reader(self) -> DirectoryReader:
        return MemoryReader(self.server, SPACE)

    def publish(self) -> None:
        self.pool.steps(3)

    def follow(self) -> None:
        for _ in range(3):
            self.follower.step(0.0)

    def check(self) -> PoolCheck:
        (found,) = compare({"r1": b"".join(self.pool.indexed())}, self.mirror, self.reader)
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    built = Scene(tmp_path)
    yield built
    built.pool.close()


def differences(found: PoolCheck) -> tuple[int, int, int, int]:
    return found.directory_missing, found.directory_phantom, found.mirror_missing, found.mirror_phantom


def test_all_agree(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4, 5, 6])
    scene.publish()
    scene.follow()
    found = scene.check()
    assert (found.pool_blocks, differences(found), found.examples) == (3, (0, 0, 0, 0), ())
    assert (found.pool, found.replica_id) == ("node-1", "r1")


def test_replicas_of_one_pool_are_compared_with_the_same(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4, 5, 6])
    scene.publish()
    scene.follow()
    keys = b"".join(scene.pool.indexed())
    found = compare({"r1": keys, "r0": keys}, scene.mirror, scene.reader)
    assert [(one.pool, one.replica_id, differences(one)) for one in found] == [
        ("node-1", "r0", (0, 0, 0, 0)),
        ("node-1", "r1", (0, 0, 0, 0)),
    ]


def test_a_replica_that_no_pool_tells_of_has_all_its_keys_missing(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    (found,) = compare({"r9": b"".join(scene.pool.indexed())}, scene.mirror, scene.reader)
    assert (found.pool, found.replica_id) == ("", "r9")
    assert differences(found) == (2, 0, 2, 0)


def test_what_is_not_published_is_missing_in_both(scene: Scene) -> None:
    scene.publish()
    scene.follow()
    scene.pool.rig.cache([1, 2, 3, 4])
    found = scene.check()
    assert differences(found) == (2, 0, 2, 0)
    assert len(found.examples) == 2


def test_a_mirror_that_lags_is_told_apart_from_the_directory(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    scene.pool.rig.pool.reset()
    scene.pool.rig.cache([7, 8])
    scene.publish()
    assert differences(scene.check()) == (0, 0, 1, 2)


def test_a_pool_of_somebody_else_is_not_looked_at(scene: Scene) -> None:
    scene.follow()
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    assert compare({}, scene.mirror, scene.reader) == []


def test_a_directory_that_is_down_says_so(scene: Scene) -> None:
    scene.publish()
    scene.follow()
    scene.server.up = False
    with pytest.raises(DirectoryUnavailable, match="switched off"):
        scene.check()
