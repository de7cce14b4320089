"""A pool, the directory and the mirrors of routers that agree or not."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.directory_check import PlaceCheck, PoolCheck, compare
from cluster.mirror_picture import MirrorPicture, PoolPicture, picture_of
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

    def picture(self, router: str = "i0") -> MirrorPicture:
        return picture_of(router, self.mirror, time.monotonic())

    def truth(self) -> bytes:
        return b"".join(self.pool.indexed())

    def check(self) -> PoolCheck:
        (found,) = compare({"r1": self.truth()}, [self.picture()], self.reader)
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    built = Scene(tmp_path)
    yield built
    built.pool.close()


def differences(found: PoolCheck) -> tuple[int, ...]:
    """Missing and phantom of each place in turn."""
    return tuple(count for place in found.places for count in (place.missing, place.phantom))


def test_all_agree(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4, 5, 6])
    scene.publish()
    scene.follow()
    found = scene.check()
    assert found == PoolCheck("node-1", ("r1",), 3, (PlaceCheck("directory", 0, 0), PlaceCheck("i0", 0, 0)))


def test_a_pool_that_replicas_share_is_compared_once(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4, 5, 6])
    scene.publish()
    scene.follow()
    scene.pool.rig.cache([7, 8])
    keys = scene.truth()
    (found,) = compare({"r1": keys, "r0": keys}, [scene.picture()], scene.reader)
    assert (found.pool, found.replica_ids, found.pool_blocks) == ("node-1", ("r0", "r1"), 4)
    assert differences(found) == (1, 0, 1, 0)


def test_what_changed_while_replicas_told_is_no_difference(scene: Scene) -> None:
    """One told before a block came, the other after it: whichever a place agrees with, it is right."""
    scene.pool.rig.cache([1, 2])
    scene.publish()
    scene.follow()
    before = scene.truth()
    scene.pool.rig.cache([3, 4])
    after = scene.truth()
    (found,) = compare({"r0": before, "r1": after}, [scene.picture()], scene.reader)
    assert (found.pool_blocks, differences(found)) == (2, (0, 0, 0, 0))
    scene.publish()
    scene.follow()
    (found,) = compare({"r0": before, "r1": after}, [scene.picture()], scene.reader)
    assert differences(found) == (0, 0, 0, 0)


def test_every_mirror_is_compared_by_itself(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    right = scene.picture("i1")
    keys = right.pools["node-1"].keys
    lacking = MirrorPicture("i2", {"node-1": PoolPicture(("r1",), keys[:16])})
    inventing = MirrorPicture("i3", {"node-1": PoolPicture(("r1",), keys + bytes(16))})
    blind = MirrorPicture("i4", {})
    (found,) = compare({"r1": scene.truth()}, [right, lacking, inventing, blind], scene.reader)
    assert [(place.place, place.missing, place.phantom) for place in found.places] == [
        ("directory", 0, 0),
        ("i1", 0, 0),
        ("i2", 1, 0),
        ("i3", 0, 1),
        ("i4", 2, 0),
    ]
    assert found.places[2].examples == (keys[16:].hex(),)
    assert found.places[3].examples == (bytes(16).hex(),)


def test_another_key_in_the_place_of_one_is_seen(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    keys = scene.picture().pools["node-1"].keys
    swapped = MirrorPicture("i0", {"node-1": PoolPicture(("r1",), keys[:16] + bytes(16))})
    (found,) = compare({"r1": scene.truth()}, [swapped], scene.reader)
    assert differences(found) == (0, 0, 1, 1)


def test_a_pool_is_found_by_whichever_mirror_knows_it(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2])
    scene.publish()
    scene.follow()
    (found,) = compare({"r1": scene.truth()}, [MirrorPicture("i0", {}), scene.picture("i1")], scene.reader)
    assert found.pool == "node-1"
    assert differences(found) == (0, 0, 1, 0, 0, 0)


def test_replicas_that_no_pool_tells_of_have_all_their_keys_missing(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    keys = scene.truth()
    found = compare({"r9": keys, "r8": keys[:16]}, [scene.picture()], scene.reader)
    assert [(one.pool, one.replica_ids, differences(one)) for one in found] == [
        ("", ("r8",), (1, 0, 1, 0)),
        ("", ("r9",), (2, 0, 2, 0)),
    ]


def test_what_is_not_published_is_missing_everywhere(scene: Scene) -> None:
    scene.publish()
    scene.follow()
    scene.pool.rig.cache([1, 2, 3, 4])
    found = scene.check()
    assert differences(found) == (2, 0, 2, 0)
    assert all(len(place.examples) == 2 for place in found.places)


def test_a_mirror_that_lags_is_told_apart_from_the_directory(scene: Scene) -> None:
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    scene.pool.rig.pool.reset()
    scene.pool.rig.cache([7, 8])
    scene.publish()
    assert differences(scene.check()) == (0, 0, 1, 2)


def test_examples_are_few(scene: Scene) -> None:
    scene.publish()
    scene.follow()
    scene.pool.rig.cache([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
    found = scene.check()
    assert found.places[0].missing > len(found.places[0].examples) == 5


def test_a_pool_of_somebody_else_is_not_looked_at(scene: Scene) -> None:
    scene.follow()
    scene.pool.rig.cache([1, 2, 3, 4])
    scene.publish()
    scene.follow()
    assert compare({}, [scene.picture()], scene.reader) == []


def test_a_directory_that_is_down_says_so(scene: Scene) -> None:
    scene.publish()
    scene.follow()
    scene.server.up = False
    with pytest.raises(DirectoryUnavailable, match="switched off"):
        scene.check()
