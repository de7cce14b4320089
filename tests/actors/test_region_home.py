"""Where replicas get their regions: adopted, shared or new, also when several come at once."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import region_home
from actors.config import Membership, ModelConfig, PoolConfig
from actors.region_home import NODE_PREFIX, REPLICA_PREFIX, Home, node_region_name, owner_tag, settle, this_machine
from kvpool import BlockGeometry, Pool, PoolError, Region, RegionMismatch, SharedMemoryTooSmall, ofd_lock

GEOMETRY = BlockGeometry(1, 1, 4, 4, "float32")
FINGERPRINT = b"f" * 32
SECRET = b"s" * 32
POOL = PoolConfig(block_tokens=4, tokens=32)

DYING = """
import os, signal, sys
from pathlib import Path
from tests.actors.test_region_home import home
from kvpool import Pool
found = home(Path(sys.argv[1]), replica_id=sys.argv[2], scope=sys.argv[3])
pool = Pool.create(found.region)
table = pool.table("done")
pool.allocate(table, 3)
pool.seal(table, 0, b"k" * 16, [1, 2, 3, 4])
print(found.region.path.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def home(
    directory: Path,
    *,
    replica_id: str = "r1",
    replicas: int = 1,
    secret: bytes = SECRET,
    geometry: BlockGeometry = GEOMETRY,
    max_model_len: int = 0,
    model_tokens: int = 0,
    machine: str = "m1",
    sleep: Callable[[float], None] = time.sleep,
    **pool: Any,
) -> Home:
    return settle(
        replace(POOL, **pool),
        ModelConfig(max_model_len=max_model_len),
        Membership("c1", secret, replicas),
        replica_id=replica_id,
        geometry=geometry,
        fingerprint=FINGERPRINT,
        model_tokens=model_tokens,
        directory=directory,
        machine=machine,
        sleep=sleep,
    )


def killed(directory: Path, replica_id: str, scope: str) -> str:
    """A replica's life that ends with SIGKILL, with one block cached and two in use; the name of its region."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DYING, str(directory), replica_id, scope]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout.strip()


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_first_replica_gets_a_new_region_of_its_own(tmp_path: Path) -> None:
    found = home(tmp_path)
    assert (found.adopted, found.floor_blocks, found.pool) == (False, 0, "replica-r1")
    assert found.region.path == tmp_path / f"{REPLICA_PREFIX}r1"
    assert found.region.owner == owner_tag(SECRET)
    assert (found.region.geometry, found.region.fingerprint) == (GEOMETRY, FINGERPRINT)
    assert found.region.capacity_blocks == 8
    assert found.region.leave()
    assert names(tmp_path) == []


@pytest.mark.parametrize("scope", ["replica", "node"])
def test_what_a_killed_replica_had_cached_is_there_for_the_next(tmp_path: Path, scope: Any) -> None:
    name = killed(tmp_path, "r1", scope)
    found = home(tmp_path, replica_id="r2", scope=scope)
    assert found.adopted
    assert found.region.path.name == name
    assert found.pool == name.removeprefix("kvatlas-"), "the pool keeps its name in the directory"
    with contextlib.closing(Pool.create(found.region)) as pool:
        assert pool.peek([b"k" * 16]) == 1
        assert pool.stats().blocks["cached"] == 1
        assert pool.check_integrity() == ""
    found.region.leave()
    assert names(tmp_path) == []


@pytest.mark.parametrize("scope", ["replica", "node"])
def test_death_after_death_leaves_one_region(tmp_path: Path, scope: Any) -> None:
    """Whether the next one has another name or the same, and wherever the last one stood."""
    for life, number in enumerate((0, 1, 1, 2, 3)):
        dying = home(tmp_path, replica_id=f"r{number}", scope=scope)
        assert dying.adopted == (life > 0)
        pool = Pool.create(dying.region)
        assert (pool.peek([b"k" * 16]), pool.available()) == (life > 0, 8)
        table = pool.table("cut off")
        assert pool.allocate(table, 5)
        pool.seal(table, 0, b"k" * 16, [1, 2, 3, 4])
        dying.region.close()  # as a death does
        assert len(names(tmp_path)) == 1
    home(tmp_path, scope=scope).region.leave()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "other",
    [
        {"secret": b"t" * 32},
        {"geometry": replace(GEOMETRY, layers=2)},
        {"geometry": replace(GEOMETRY, block_tokens=8), "block_tokens": 8},
        {"tokens": 36},
    ],
)
@pytest.mark.parametrize("scope", ["replica", "node"])
def test_nothing_of_another_kind_is_adopted(tmp_path: Path, scope: Any, other: dict[str, Any]) -> None:
    home(tmp_path, scope=scope).region.close()
    found = home(tmp_path, replica_id="r2", scope=scope, **other)
    assert not found.adopted
    assert found.region.leave()


@pytest.mark.parametrize(("scope", "other"), [("replica", "node"), ("node", "replica")])
def test_the_scopes_do_not_adopt_from_each_other(tmp_path: Path, scope: Any, other: Any) -> None:
    home(tmp_path, scope=scope).region.close()
    found = home(tmp_path, replica_id="r2", scope=other)
    assert not found.adopted
    found.region.leave()


def test_a_size_that_is_not_given_may_be_any(tmp_path: Path) -> None:
    home(tmp_path, tokens=400).region.close()
    found = home(tmp_path, replica_id="r2", tokens=0)
    assert (found.adopted, found.region.capacity_blocks) == (True, 100)
    found.region.leave()


def test_replicas_that_start_together_adopt_different_regions(tmp_path: Path) -> None:
    for dying in [home(tmp_path, replica_id=name) for name in ("r1", "r2")]:
        dying.region.close()
    found = [home(tmp_path, replica_id=name) for name in ("r3", "r4", "r5")]
    assert [one.adopted for one in found] == [True, True, False]
    assert len({one.pool for one in found}) == 3
    for one in found:
        one.region.leave()
    assert names(tmp_path) == []


def test_an_orphan_with_our_name_that_does_not_fit_makes_way(tmp_path: Path) -> None:
    home(tmp_path, tokens=400).region.close()
    found = home(tmp_path)
    assert (found.adopted, found.region.capacity_blocks) == (False, 8)
    with pytest.raises(PoolError, match="already"):
        home(tmp_path, tokens=44)
    found.region.leave()


def test_orphans_go_by_age_and_never_before_they_could_be_adopted(tmp_path: Path) -> None:
    for name in ("old", "foreign", "young"):
        secret = b"t" * 32 if name == "foreign" else SECRET
        region = home(tmp_path, replica_id=name, tokens=400 if name == "old" else 32, secret=secret).region
        region.close()
        if name != "young":
            os.utime(region.path, (time.time() - 700,) * 2)
    found = home(tmp_path, replica_id="r2")
    assert found.pool == "replica-young"
    assert names(tmp_path) == ["kvatlas-replica-young"]
    found.region.close()
    os.utime(found.region.path, (1, 1))
    again = home(tmp_path, replica_id="r3")
    assert (again.adopted, again.pool) == (True, "replica-young"), "however old: what is there is right"
    again.region.leave()


def test_orphans_make_room_and_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto-sized: a share of all that can be had, also of what must be removed first, the oldest first."""
    geometry = BlockGeometry(8, 2, 64, 4, "float32")
    for age, name in enumerate(("young", "old")):
        region = home(tmp_path, replica_id=name, tokens=500, secret=bytes([age]) * 32, geometry=geometry).region
        region.close()
        os.utime(region.path, (time.time() - 10 * (age + 1),) * 2)
    size = 10_000_000

    def statvfs(path: object) -> SimpleNamespace:
        used = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
        return SimpleNamespace(f_bavail=size - used, f_frsize=1)

    assert 1_000_000 < statvfs(tmp_path).f_bavail < size // 4
    monkeypatch.setattr(os, "statvfs", statvfs)
    found = home(tmp_path, tokens=0, geometry=geometry)
    assert found.region.capacity_blocks == size // 2 // geometry.block_bytes
    assert names(tmp_path) == ["kvatlas-replica-r1", "kvatlas-replica-young"]
    with pytest.raises(SharedMemoryTooSmall, match="the pool needs"):
        home(tmp_path, replica_id="r9", tokens=10**6)
    assert "kvatlas-replica-young" in names(tmp_path), "no use to remove it"
    found.region.leave()


def test_all_replicas_of_a_machine_share_one_region(tmp_path: Path) -> None:
    found = [home(tmp_path, replica_id=f"r{n}", replicas=3, scope="node", max_model_len=20) for n in range(3)]
    assert len({one.region.path for one in found}) == len(names(tmp_path)) == 1
    assert found[0].region.path.name.startswith(NODE_PREFIX)
    assert [one.region.capacity_blocks for one in found] == [24] * 3
    assert [one.floor_blocks for one in found] == [5] * 3
    assert not any(one.adopted for one in found)
    found[0].region.kv_memory[7] = 9
    assert found[2].region.kv_memory[7] == 9
    assert [one.region.leave() for one in found] == [False, False, True]
    assert names(tmp_path) == []


def test_a_floor_is_one_longest_request_and_no_more_than_an_even_share(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"max_model_len": 9}, 3),
        ({"model_tokens": 12, "max_model_len": 30}, 3),
        ({"model_tokens": 10_000}, 8),
        ({}, 8),
    ]
    for options, floor in cases:
        found = home(tmp_path, replicas=2, scope="node", **options)
        assert found.floor_blocks == floor
        found.region.leave()


def test_a_shared_region_that_lives_keeps_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = home(tmp_path, scope="node")
    with caplog.at_level(logging.WARNING):
        second = home(tmp_path, scope="node", tokens=400)
    assert second.region.capacity_blocks == 8
    assert "8 blocks, not the 100" in caplog.text
    first.region.leave()
    second.region.close()
    third = home(tmp_path, scope="node", tokens=400)
    assert (third.adopted, third.region.capacity_blocks) == (False, 100), "an orphan makes way"
    third.region.leave()


def test_of_many_that_start_at_once_one_creates_and_the_others_attach(tmp_path: Path) -> None:
    for left_over in (False, True):
        if left_over:
            home(tmp_path, replicas=6, scope="node").region.close()
        found: list[Home] = []
        barrier = threading.Barrier(6)

        def start(barrier: threading.Barrier = barrier, found: list[Home] = found) -> None:
            barrier.wait()
            found.append(home(tmp_path, replicas=6, scope="node", sleep=lambda _: time.sleep(0.001)))

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6
        assert len({one.region.incarnation for one in found}) == 1
        assert len(names(tmp_path)) == 1
        assert sum(one.adopted for one in found) == left_over
        for one in found:
            one.region.leave()
        assert names(tmp_path) == []


def test_who_finds_a_region_in_the_making_or_in_adoption_waits(tmp_path: Path) -> None:
    first = home(tmp_path, scope="node").region
    first.close()
    holder = os.open(first.path, os.O_RDWR)
    assert ofd_lock.try_lock(holder, 0, 0)
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(holder)

    found = home(tmp_path, scope="node", sleep=sleep)
    assert found.adopted
    assert len(pauses) == 3
    found.region.leave()

    making = tmp_path / f"{first.path.name}.creating"
    maker = os.open(making, os.O_RDWR | os.O_CREAT)
    assert ofd_lock.try_lock(maker, 0, 64, shared=True)

    def finish(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            os.close(maker)  # it died

    found = home(tmp_path, scope="node", sleep=finish)
    assert not found.adopted
    assert len(pauses) == 5
    assert found.region.leave()
    assert names(tmp_path) == []


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_home, "_LONGEST_S", 1.0)
    first = home(tmp_path, scope="node").region
    first.close()
    holder = os.open(first.path, os.O_RDWR)
    assert ofd_lock.try_lock(holder, 0, 0)
    waited: list[float] = []
    with pytest.raises(PoolError, match="was not to be had for 1 s"):
        home(tmp_path, scope="node", sleep=waited.append)
    assert sum(waited) == pytest.approx(1.0)
    os.close(holder)


def test_a_living_region_that_is_damaged_is_told(tmp_path: Path) -> None:
    found = home(tmp_path, scope="node")
    with open(found.region.path, "r+b") as file:
        file.seek(8 * 14)
        file.write(bytes(8))
    with pytest.raises(RegionMismatch, match="damaged"):
        home(tmp_path, scope="node")
    found.region.leave()


def test_names_of_shared_regions_differ_where_regions_must(tmp_path: Path) -> None:
    owner = owner_tag(SECRET)
    same = node_region_name(owner, FINGERPRINT, GEOMETRY, "m1")
    assert same == node_region_name(owner, FINGERPRINT, GEOMETRY, "m1")
    assert len(same) == len(NODE_PREFIX) + 16
    others = {
        node_region_name(owner_tag(b"t" * 32), FINGERPRINT, GEOMETRY, "m1"),
        node_region_name(owner, b"g" * 32, GEOMETRY, "m1"),
        node_region_name(owner, FINGERPRINT, replace(GEOMETRY, dtype="float16"), "m1"),
        node_region_name(owner, FINGERPRINT, replace(GEOMETRY, block_tokens=8), "m1"),
        node_region_name(owner, FINGERPRINT, GEOMETRY, "m2"),
    }
    assert len(others | {same}) == 6
    assert this_machine() == this_machine() != ""


def test_an_owners_tag_follows_from_the_secret_and_does_not_show_it() -> None:
    assert owner_tag(SECRET) == owner_tag(SECRET)
    assert owner_tag(SECRET) != owner_tag(b"t" * 32)
    assert len(owner_tag(SECRET)) == 16
    assert SECRET[:4] not in owner_tag(SECRET)


def test_nothing_stays_behind_when_no_region_can_be_had(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for scope in ("replica", "node"):
        with pytest.raises(SharedMemoryTooSmall):
            home(tmp_path, tokens=2**31 - 1, geometry=BlockGeometry(64, 64, 128, 4, "float32"), scope=scope)
    assert names(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_region_of_another_build_is_left_to_its_age(tmp_path: Path) -> None:
    region = Region.create(
        tmp_path, f"{REPLICA_PREFIX}x", GEOMETRY, 8, FINGERPRINT, random.Random(1), owner_tag(SECRET)
    )
    region.close()
    with open(region.path, "r+b") as file:
        file.seek(8)
        file.write(bytes([99]))
    found = home(tmp_path)
    assert not found.adopted
    assert len(names(tmp_path)) == 2
    os.utime(region.path, (1, 1))
    other = home(tmp_path, replica_id="r2")
    assert region.path.name not in names(tmp_path)
    found.region.leave()
    other.region.leave()
