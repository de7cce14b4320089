from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.directory import (
    Batch,
    Bounds,
    Cursor,
    Gone,
    Heartbeat,
    Message,
    PoolLoad,
    ReplicaLoad,
    Snapshot,
    Space,
    Writer,
)
from kvpool.directory.digest import digest_of
from kvpool.directory.memory import MemoryReader, MemoryServer, MemoryWriter
from kvpool.directory.messages import split_keys
from kvpool.directory.publisher import PublisherSettings
from tests.fakes.published_pool import CutWriter, PublishedPool

SPACE = Space("c", "ab" * 8, 2)
SETTINGS = PublisherSettings(batch_keys=4, tail_keys=6)
BOUNDS = Bounds(log_entries=40)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(random.Random(1), BOUNDS)


@pytest.fixture
def pool(tmp_path: Path, server: MemoryServer) -> Iterator[PublishedPool]:
    made = PublishedPool(tmp_path, MemoryWriter(server, SPACE), settings=SETTINGS, bounds=BOUNDS)
    yield made
    made.close()


def written(pool: PublishedPool, kind: type[Message]) -> list[Message]:
    return [message for message in pool.writer.written if isinstance(message, kind)]


def stored(server: MemoryServer) -> Snapshot:
    found = MemoryReader(server, SPACE).snapshot("pool-0")
    assert found is not None
    return found.snapshot


def test_a_session_begins_with_all_that_is_there(pool: PublishedPool, server: MemoryServer) -> None:
    pool.rig.cache([1, 2, 3, 4])
    pool.steps()
    snapshot = stored(server)
    assert split_keys(snapshot.keys) == pool.rig.keys([1, 2, 3, 4])
    assert snapshot.digest == digest_of(snapshot.keys)
    assert snapshot.writer == Writer("pool-0", pool.rig.region.incarnation, snapshot.writer.epoch)
    assert [type(message) for message in pool.writer.written] == [Heartbeat]


def test_batches_are_numbered_and_carry_the_digest_after(pool: PublishedPool) -> None:
    pool.steps()
    keys: set[bytes] = set()
    pool.rig.cache([1, 2, 3, 4])
    pool.steps()
    pool.rig.pool.evict(1)
    pool.rig.cache([5, 6])
    pool.steps()
    for number, batch in enumerate(written(pool, Batch)):
        assert isinstance(batch, Batch)
        assert batch.seq == number + 1
        assert set(split_keys(batch.removed)) <= keys
        keys = keys - set(split_keys(batch.removed)) | set(split_keys(batch.added))
        assert batch.digest == digest_of(b"".join(keys))
    assert keys == pool.indexed()


def test_every_prefix_of_what_is_said_is_prefix_closed(pool: PublishedPool) -> None:
    """Key by key, also inside a batch: a parent comes before its children and leaves after them."""
    rig, rng = pool.rig, random.Random(5)
    parent_of: dict[bytes, bytes] = {}
    pool.steps()
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.choice((4, 8, 12)))]
        keys = rig.keys(tokens)
        parent_of.update(zip(keys[1:], keys, strict=False))
        rig.cache(tokens)
        rig.pool.evict(rng.randrange(5))
        pool.steps(rng.randrange(3))
    pool.steps(10, 0.1)
    held: set[bytes] = set()
    for batch in written(pool, Batch):
        assert isinstance(batch, Batch)
        assert max(len(batch.removed), len(batch.added)) <= 16 * SETTINGS.batch_keys
        for gone in split_keys(batch.removed):
            held.remove(gone)
            assert not any(parent_of.get(key) == gone for key in held)
        for key in split_keys(batch.added):
            assert key not in parent_of or parent_of[key] in held
            held.add(key)
    assert held == pool.indexed()


def test_heartbeats_come_in_time_and_on_change(pool: PublishedPool) -> None:
    pool.steps(1)
    pool.steps(100, 0.01)
    assert 5 <= len(written(pool, Heartbeat)) <= 7
    pool.load = PoolLoad(9, (ReplicaLoad("r0", running=3), ReplicaLoad("r1", waiting=2)))
    before = len(written(pool, Heartbeat))
    pool.steps(7, 0.01)
    beats = written(pool, Heartbeat)
    assert len(beats) == before + 1
    assert isinstance(beats[-1], Heartbeat)
    assert (beats[-1].free_blocks, beats[-1].replicas) == (pool.load.free_blocks, pool.load.replicas)
    assert pool.now - 0.07 <= beats[-1].told_at <= pool.now
    for number in range(100):  # a load that never stands still is said at a bounded rate
        pool.load = PoolLoad(9, (ReplicaLoad("r0", running=3), ReplicaLoad("r1", waiting=number)))
        pool.steps(1, 0.01)
    assert len(written(pool, Heartbeat)) <= before + 1 + 21


def test_the_snapshot_follows_a_growing_tail(pool: PublishedPool, server: MemoryServer) -> None:
    pool.steps()
    for start in range(0, 28, 2):
        pool.rig.cache([start, start + 1])
        pool.steps()
    assert pool.publisher.stats().snapshots >= 2
    assert stored(server).seq >= 7
    reader = MemoryReader(server, SPACE)
    for _ in range(200):  # heartbeats alone push the log on; what the snapshot lacks must not fall off
        pool.steps(1, 0.2)
        found, tip = reader.snapshot("pool-0"), reader.tip()
        assert found is not None
        behind = reader.read(Cursor(tip.life, max(found.at, tip.oldest - 1)), 0).entries
        batches = [entry.message for entry in behind if isinstance(entry.message, Batch)]
        assert [batch.seq for batch in batches] == list(range(found.snapshot.seq + 1, pool.publisher.stats().seq + 1))


def test_an_old_snapshot_is_renewed(pool: PublishedPool) -> None:
    pool.steps()
    pool.steps(1, 61.0)
    assert pool.publisher.stats().snapshots == 2


@pytest.mark.parametrize("cut", ["before", "after"])
def test_an_outage_ends_with_a_new_session(pool: PublishedPool, server: MemoryServer, cut: str) -> None:
    pool.rig.cache([1, 2])
    pool.steps()
    epoch = pool.publisher.stats().epoch
    pool.writer.cut = cut
    for start in range(10, 60, 2):
        pool.rig.cache([start, start + 1])
        pool.steps()
    stats = pool.publisher.stats()
    assert stats.state == "waiting"
    assert stats.failures >= 1
    assert stats.lag_s > 0.05
    pool.writer.cut = ""
    pool.steps(30, 0.1)
    stats = pool.publisher.stats()
    assert (stats.state, stats.sessions, stats.seq) == ("open", 2, 0)
    assert stats.epoch != epoch
    assert stats.lag_s < 0.01
    assert set(split_keys(stored(server).keys)) == pool.indexed()


def test_tries_become_rarer(pool: PublishedPool) -> None:
    pool.writer.cut = "before"
    pool.steps(1000, 0.01)
    assert 7 <= pool.publisher.stats().failures <= 20


def test_a_directory_that_lost_everything_is_told_again(pool: PublishedPool, server: MemoryServer) -> None:
    pool.rig.cache([1, 2])
    pool.steps()
    server.spaces.clear()
    pool.rig.cache([3, 4])
    pool.steps(30, 0.02)
    stats = pool.publisher.stats()
    assert (stats.state, stats.refused) == ("open", {"unknown": 1})
    assert set(split_keys(stored(server).keys)) == pool.indexed()
    assert pool.lost == []


def test_a_directory_that_came_back_with_an_earlier_epoch_is_told_again(
    pool: PublishedPool, server: MemoryServer
) -> None:
    """It does not know of this publisher's session; that somebody else published before is no reason to fall silent."""
    pool.rig.cache([1, 2])
    pool.steps()
    old = copy.deepcopy(server.spaces)
    pool.end(goodbye=False)
    pool.begin()
    pool.steps()
    server.spaces = old
    pool.rig.cache([3, 4])
    pool.steps(30, 0.02)
    stats = pool.publisher.stats()
    assert (stats.state, stats.refused, stats.sessions) == ("open", {"epoch": 1}, 2)
    assert set(split_keys(stored(server).keys)) == pool.indexed()
    assert pool.lost == []


def test_a_lost_fence_ends_it_once(pool: PublishedPool, server: MemoryServer) -> None:
    pool.steps()
    other = Writer("pool-0", 77, 1)
    MemoryWriter(server, SPACE).open(Snapshot(other, 0, b"", 0))
    pool.rig.cache([1, 2])
    pool.steps(200, 0.05)
    assert [refused.reason for refused in pool.lost] == ["incarnation"]
    stats = pool.publisher.stats()
    assert (stats.state, stats.refused) == ("lost", {"incarnation": 1})
    assert MemoryReader(server, SPACE).pools()[0].writer == other
    pool.publisher.close()
    assert written(pool, Gone) == []


def test_it_does_not_open_unless_it_may(pool: PublishedPool, server: MemoryServer) -> None:
    pool.allowed = False
    pool.rig.cache([1, 2])
    pool.steps(10)
    assert MemoryReader(server, SPACE).pools() == []
    pool.allowed = True
    pool.steps()
    assert set(split_keys(stored(server).keys)) == pool.indexed()


def test_without_the_role_it_touches_neither_region_nor_directory(pool: PublishedPool, server: MemoryServer) -> None:
    pool.steps()
    cut_off = CutWriter(MemoryWriter(server, SPACE))
    cut_off.cut = "before"  # whatever it wrote would count as a failure
    rival = pool.rival(cut_off)
    pool.rig.cache([1, 2, 3, 4])
    bits = pool.control.array("dirty").tolist()
    assert any(bits)
    for _ in range(50):
        pool.now += 0.1
        assert not rival.step()
    assert pool.control.array("dirty").tolist() == bits
    stats = rival.stats()
    assert rival.stands_by
    assert (stats.state, stats.failures, stats.sessions, stats.published_blocks) == ("standby", 0, 0, 0)
    assert stats.lag_s == 0.0
    pool.steps()
    assert (
        set(split_keys(stored(server).keys))
        | {key for batch in written(pool, Batch) if isinstance(batch, Batch) for key in split_keys(batch.added)}
        == pool.indexed()
    )


def test_a_role_that_is_free_again_is_taken_over(pool: PublishedPool, server: MemoryServer) -> None:
    writer = CutWriter(MemoryWriter(server, SPACE))
    rival = pool.rival(writer)
    pool.rig.cache([1, 2, 3, 4])
    pool.steps()
    rival.step()
    epoch = pool.publisher.stats().epoch
    pool.rig.cache([1, 2, 5, 6])  # the first dies with bits that it took, and others that it did not
    pool.control.array("dirty")[:] = 0
    pool.rig.cache([7, 8])
    pool.role.free()
    pool.now += 0.1
    assert rival.step()
    stats = rival.stats()
    assert (stats.state, stats.sessions, stats.seq) == ("open", 1, 0)
    assert stats.epoch != epoch
    assert set(split_keys(stored(server).keys)) == pool.indexed()
    # The first was only stopped: it is refused once, and then neither writes nor looks.
    before = len(pool.writer.written)
    pool.steps(100, 0.05)
    assert len(pool.writer.written) == before
    first = pool.publisher.stats()
    assert (first.state, first.refused, first.published_blocks) == ("lost", {"epoch": 1}, 0)
    pool.rig.cache([9, 9])
    bits = pool.control.array("dirty").tolist()
    pool.steps(100, 0.05)
    assert pool.control.array("dirty").tolist() == bits
    rival.step()
    assert [type(message) for message in writer.written[-2:]] == [Batch, Heartbeat]
    assert rival.stats().published_blocks == len(pool.indexed())


def test_a_session_begins_when_all_blocks_have_been_looked_at(tmp_path: Path, server: MemoryServer) -> None:
    """However many there are: a session that began with a part would take the rest away from every mirror."""
    pool = PublishedPool(tmp_path, MemoryWriter(server, SPACE), capacity_blocks=200, settings=SETTINGS, bounds=BOUNDS)
    for number in range(100):
        pool.rig.cache([number, number])
    steps = 0
    while pool.publisher.stats().state != "open":
        pool.steps()
        steps += 1
        assert pool.publisher.stats().published_blocks <= 40 * steps
    assert steps > 2
    assert len(split_keys(stored(server).keys)) == 100
    assert written(pool, Batch) == []
    pool.close()


def test_a_role_that_was_lost_in_an_outage_is_asked_for_again(pool: PublishedPool, server: MemoryServer) -> None:
    pool.rig.cache([1, 2])
    pool.steps()
    pool.writer.cut = "before"
    pool.steps(30, 0.1)
    assert pool.publisher.stats().state == "waiting"
    pool.allowed = False
    pool.writer.cut = ""
    pool.rig.cache([3, 4])
    bits = pool.control.array("dirty").tolist()
    pool.steps(30, 0.1)
    assert pool.publisher.stats().state == "standby"
    assert pool.control.array("dirty").tolist() == bits
    pool.allowed = True
    pool.steps()
    stats = pool.publisher.stats()
    assert (stats.state, stats.sessions, stats.published_blocks) == ("open", 2, 2)
    assert set(split_keys(stored(server).keys)) == pool.indexed()


def test_one_that_stood_by_leaves_without_a_word(pool: PublishedPool, server: MemoryServer) -> None:
    pool.steps()
    writer = CutWriter(MemoryWriter(server, SPACE))
    rival = pool.rival(writer)
    rival.step()
    rival.close()
    assert writer.written == []
    assert not rival.stands_by
    assert len(MemoryReader(server, SPACE).pools()) == 1


def test_a_goodbye_is_said_once(pool: PublishedPool, server: MemoryServer) -> None:
    pool.steps()
    pool.publisher.close()
    pool.publisher.close()
    assert len(written(pool, Gone)) == 1
    assert MemoryReader(server, SPACE).pools() == []
    assert not pool.publisher.step()


def test_a_goodbye_that_does_not_arrive_harms_nobody(pool: PublishedPool) -> None:
    pool.steps()
    pool.writer.cut = "before"
    pool.publisher.close()
    assert pool.publisher.stats().state == "closed"


def test_a_batch_size_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 512"):
        PublisherSettings(batch_keys=513)
