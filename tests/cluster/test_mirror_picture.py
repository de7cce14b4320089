"""What a router tells the one that compares all of them."""

from __future__ import annotations

import pickle

from cluster.mirror_picture import LONE, MirrorPicture, PoolPicture, all_routers, own_name, picture_of
from kvpool.directory import ReplicaLoad
from tests.fakes.speaker import packed
from tests.router.scene import FRESH_S, Scene


def sorted_keys(keys: bytes) -> list[bytes]:
    return sorted(keys[start : start + 16] for start in range(0, len(keys), 16))


def test_every_pool_with_its_replicas_and_keys() -> None:
    scene = Scene()
    scene.hear_shared("shared", ReplicaLoad("r0"), ReplicaLoad("r1"), held=[1, 2, 3])
    scene.hear("r2")
    picture = picture_of("i0", scene.mirror, scene.now)
    assert picture.router == "i0"
    assert picture.pools.keys() == {"shared", "p-r2"}
    assert picture.pools["shared"].replica_ids == ("r0", "r1")
    assert sorted_keys(picture.pools["shared"].keys) == sorted_keys(packed([1, 2, 3]))
    assert picture.pools["p-r2"] == PoolPicture(("r2",), b"")


def test_a_pool_whose_lease_is_over_is_none() -> None:
    scene = Scene()
    scene.hear("r0", held=[1])
    assert picture_of("i0", scene.mirror, scene.now + FRESH_S + 1.0) == MirrorPicture("i0", {})


def test_it_travels() -> None:
    picture = MirrorPicture("i0", {"p": PoolPicture(("r0",), packed([1, 2]))})
    assert pickle.loads(pickle.dumps(picture)) == picture


def test_keys_are_in_no_log_line() -> None:
    assert packed([1]).hex() not in repr(PoolPicture(("r0",), packed([1])))
    assert "keys" not in repr(PoolPicture(("r0",), packed([1])))


async def test_a_process_outside_serve_is_alone() -> None:
    assert own_name() == LONE
    assert await all_routers() is None
