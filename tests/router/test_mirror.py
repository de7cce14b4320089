from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.directory import (
    Batch,
    Gone,
    LogEntry,
    MalformedEntry,
    Message,
    PoolInfo,
    ReplicaLoad,
    Snapshot,
    StoredSnapshot,
    Writer,
)
from kvpool.directory.digest import digest_of
from router.mirror import Mirror, MirrorLimits
from tests.fakes.speaker import Speaker, key, packed
from tests.router.scene import NoEnd


class Feed:
    """A mirror that is given entries by hand."""

    def __init__(self, limits: MirrorLimits | None = None) -> None:
        self.mirror = Mirror(limits)
        self.position = 0
        self.now = 10.0

    def load(self, speaker: Speaker) -> bool:
        return self.mirror.load(StoredSnapshot(speaker.snapshot(), self.position), self.now)

    def apply(self, message: Message | MalformedEntry) -> LogEntry:
        self.position += 1
        entry = LogEntry(self.position, message)
        self.mirror.apply(entry, self.now)
        return entry


def speaker(pool: str = "pool-0", incarnation: int = 11, epoch: int = 1) -> Speaker:
    return Speaker(NoEnd(), pool, incarnation, epoch)


@given(st.integers(0, 70), st.integers(0, 70))
def test_match_is_the_longest_prefix(held: int, asked: int) -> None:
    feed, one = Feed(), speaker()
    one.held = list(range(held))
    feed.load(one)
    feed.apply(one.heartbeat())
    assert feed.mirror.match([key(number) for number in range(asked)]) == {"pool-0": min(held, asked)}


def test_match_names_every_known_pool() -> None:
    feed, one, two = Feed(), speaker("a"), speaker("b")
    one.held, two.held = [1, 2, 3], [1]
    for each in (one, two):
        feed.load(each)
        feed.apply(each.heartbeat())
    assert feed.mirror.match([key(1), key(2), key(9)]) == {"a": 2, "b": 1}
    assert feed.mirror.match([]) == {"a": 0, "b": 0}


def test_entries_read_again_change_nothing() -> None:
    feed, one = Feed(), speaker()
    feed.load(one)
    entries = [feed.apply(message) for message in (one.batch(added=[1, 2]), one.heartbeat(), one.batch(removed=[2]))]
    before = (feed.mirror.keys("pool-0"), feed.mirror.pools(feed.now))
    feed.now += 2.0
    for entry in entries * 2:
        feed.mirror.apply(entry, feed.now)
    feed.now -= 2.0
    assert (feed.mirror.keys("pool-0"), feed.mirror.pools(feed.now)) == before  # not even signs of life
    assert feed.mirror.counts["gaps"] == 0


def test_what_the_snapshot_contains_is_passed_over() -> None:
    feed, one = Feed(), speaker()
    feed.load(one)
    first = feed.apply(one.batch(added=[1]))
    feed.load(one)
    feed.mirror.apply(first, feed.now)
    assert feed.mirror.keys("pool-0") == {key(1)}
    assert feed.mirror.counts["digest_mismatches"] == 0


def test_a_missing_batch_drops_the_keys() -> None:
    feed, one = Feed(), speaker()
    one.held = [1]
    feed.load(one)
    one.batch(added=[2])
    feed.apply(one.batch(added=[3]))
    assert feed.mirror.keys("pool-0") == set()
    assert feed.mirror.wants_snapshot(feed.now) == ["pool-0"]
    feed.load(one)
    assert feed.mirror.wants_snapshot(feed.now) == []
    assert feed.mirror.keys("pool-0") == one.keys


def test_a_heartbeat_with_a_later_number_is_a_gap() -> None:
    feed, one = Feed(), speaker()
    feed.load(one)
    one.batch(added=[1])
    feed.apply(one.heartbeat())
    assert feed.mirror.counts["gaps"] == 1


@pytest.mark.parametrize("what", ["digest", "twice", "unknown"])
def test_a_batch_that_does_not_fit_drops_the_keys(what: str) -> None:
    feed, one = Feed(), speaker()
    one.held = [1]
    feed.load(one)
    batch = one.batch(added=[2])
    wrong = {
        "digest": Batch(batch.writer, batch.seq, b"", batch.added, batch.digest ^ 1),
        "twice": Batch(batch.writer, batch.seq, b"", packed([1]), digest_of(packed([1, 1]))),
        "unknown": Batch(batch.writer, batch.seq, packed([7]), packed([7, 2]), digest_of(packed([1, 2]))),
    }[what]
    feed.apply(wrong)
    view = feed.mirror.pools(feed.now)[0]
    assert not view.whole
    assert view.key_blocks == 0
    assert feed.mirror.match([key(1)]) == {}
    assert feed.mirror.counts["digest_mismatches"] == 1


def test_faults_that_do_not_heal_are_tried_ever_more_rarely() -> None:
    feed, one = Feed(), speaker()
    feed.load(one)
    tries = 0
    for _ in range(2000):
        feed.now += 0.01
        feed.apply(one.heartbeat())
        if feed.mirror.wants_snapshot(feed.now):
            tries += 1
            feed.load(one)
        batch = one.batch()
        if feed.mirror.keys("pool-0") == set() and not feed.mirror.wants_snapshot(feed.now):
            feed.apply(Batch(batch.writer, batch.seq, b"", packed([1]), 1))
            feed.mirror.snapshot_failed("pool-0", feed.now)
    assert tries < 40


def test_another_writer_voids_the_keys_and_goes_unheard_when_it_is_old() -> None:
    feed, old, new = Feed(), speaker(epoch=1), speaker(epoch=2)
    old.held = [1]
    feed.load(old)
    early = feed.apply(old.heartbeat())
    feed.apply(new.heartbeat())
    assert feed.mirror.keys("pool-0") == set()
    assert feed.mirror.pools(feed.now)[0].epoch == 2
    feed.mirror.apply(early, feed.now)
    feed.apply(Gone(old.writer, 0))
    assert feed.mirror.pools(feed.now)[0].epoch == 2
    feed.load(new)
    assert feed.mirror.wants_snapshot(feed.now) == []


def test_what_an_earlier_writer_said_before_the_snapshot_is_passed_over() -> None:
    """The snapshot was read while the mirror had not come to the change of writers yet."""
    feed, old, new = Feed(), speaker(epoch=1), speaker(epoch=2)
    new.held = [1]
    feed.mirror.load(StoredSnapshot(new.snapshot(), 5), feed.now)
    feed.apply(old.heartbeat())
    feed.apply(Gone(old.writer, 0))
    assert feed.mirror.keys("pool-0") == {key(1)}
    assert feed.mirror.counts["replaced_writers"] == 0


def test_a_new_epoch_keeps_the_load_and_a_new_incarnation_does_not() -> None:
    feed, old = Feed(), speaker(epoch=1)
    loads = (ReplicaLoad("r0", running=5), ReplicaLoad("r1", queued_prefill_tokens=70))
    feed.apply(old.heartbeat(*loads, free_blocks=9))
    feed.apply(speaker(epoch=2).batch())
    view = feed.mirror.pools(feed.now)[0]
    assert (view.replicas, view.replica_ids, view.free_blocks) == (loads, ("r0", "r1"), 9)
    feed.apply(speaker(epoch=3, incarnation=12).batch())
    view = feed.mirror.pools(feed.now)[0]
    assert (view.replicas, view.replica_ids, view.free_blocks) == ((), (), 0)


def test_a_new_epoch_of_which_the_snapshot_comes_first_keeps_the_load() -> None:
    feed, old, new = Feed(), speaker(epoch=1), speaker(epoch=2)
    feed.apply(old.heartbeat(ReplicaLoad("r0", running=5), free_blocks=9, lease_s=2.0))
    new.held = [1]
    feed.load(new)
    feed.apply(new.batch(added=[2]))
    (view,) = feed.mirror.pools(feed.now)
    assert (view.epoch, view.replicas, view.free_blocks) == (2, (ReplicaLoad("r0", running=5),), 9)
    assert (view.lease_s, view.key_blocks) == (2.0, 2)


def test_a_replica_that_left_a_shared_pool_is_no_longer_in_it() -> None:
    feed, one = Feed(), speaker()
    one.held = [1]
    feed.load(one)
    feed.apply(one.heartbeat(ReplicaLoad("r0"), ReplicaLoad("r1")))
    feed.apply(one.heartbeat(ReplicaLoad("r1", running=2)))
    (view,) = feed.mirror.pools(feed.now)
    assert (view.replica_ids, view.whole, view.key_blocks) == (("r1",), True, 1)


def test_a_pool_that_says_goodbye_is_gone() -> None:
    feed, one = Feed(), speaker()
    feed.apply(one.heartbeat())
    feed.apply(Gone(one.writer, 0))
    assert feed.mirror.pools(feed.now) == []
    assert feed.mirror.wants_snapshot(feed.now) == []


def test_a_lease_ends_and_memory_is_given_back_later() -> None:
    feed, one, unheard = Feed(), speaker("a"), speaker("b")
    one.held = [1]
    feed.load(one)
    feed.load(unheard)
    feed.apply(one.heartbeat(lease_s=1.0))
    feed.now += 1.5
    assert feed.mirror.pools(feed.now) == []
    assert feed.mirror.keys("a") == {key(1)}
    feed.now += 9.0
    feed.mirror.wants_snapshot(feed.now)
    assert feed.mirror.keys("a") == set()
    feed.now += 30.0
    feed.mirror.wants_snapshot(feed.now)
    assert feed.mirror.counts["expired"] == 2


def test_bounds_hold() -> None:
    feed = Feed(MirrorLimits(max_pools=2, max_keys=3))
    for name in ("a", "b", "c"):
        feed.apply(speaker(name).heartbeat())
    assert [view.pool for view in feed.mirror.pools(feed.now)] == ["a", "b"]
    assert not feed.load(speaker("d"))
    one = speaker("a")
    one.held = [1, 2, 3, 4]
    assert not feed.load(one)
    one = speaker("b")
    one.held = [1, 2, 3]
    assert feed.load(one)
    feed.apply(one.batch(added=[4]))
    assert feed.mirror.keys("b") == set()
    assert feed.mirror.counts["overflows"] == 4


def test_a_snapshot_with_a_key_twice_is_not_believed() -> None:
    feed = Feed()
    writer = Writer("a", 1, 1)
    keys = packed([1, 1])
    assert not feed.mirror.load(StoredSnapshot(Snapshot(writer, 0, keys, digest_of(keys)), 0), feed.now)


def test_malformed_entries_are_counted_once() -> None:
    feed = Feed()
    entry = feed.apply(MalformedEntry("x"))
    feed.mirror.apply(entry, feed.now)
    assert feed.mirror.counts["malformed"] == 1


def test_what_is_current_need_not_be_read() -> None:
    feed, one = Feed(), speaker()
    info = PoolInfo(one.writer, 0, 0)
    assert not feed.mirror.is_current(info)
    feed.load(one)
    assert feed.mirror.is_current(info)
    assert not feed.mirror.is_current(PoolInfo(speaker(epoch=9).writer, 0, 0))


def test_lag() -> None:
    mirror = Mirror()
    assert mirror.lag_s(5.0) == float("inf")
    mirror.note_progress(5.0, 0)
    mirror.note_progress(6.0, 3)
    assert (mirror.lag_s(7.5), mirror.lag_entries()) == (2.5, 3)
    mirror.snapshot_failed("nobody", 1.0)
    assert mirror.keys("nobody") == set()


def test_the_age_of_the_load_is_that_of_the_heartbeat_that_brought_it() -> None:
    feed, one = Feed(), speaker()
    feed.load(one)
    feed.apply(one.batch(added=[1]))
    assert feed.mirror.pools(feed.now)[0].load_age_s == float("inf")  # a sign of life, but no load
    feed.apply(one.heartbeat(ReplicaLoad("r", running=1)))
    feed.now += 0.5
    feed.apply(one.batch(added=[2]))
    feed.now += 0.25
    view = feed.mirror.pools(feed.now)[0]
    assert (view.age_s, view.load_age_s) == (0.25, 0.75)
    feed.apply(speaker(epoch=2).batch())
    assert feed.mirror.pools(feed.now)[0].load_age_s == 0.75  # kept with the load
    feed.apply(speaker(epoch=3, incarnation=12).batch())
    assert feed.mirror.pools(feed.now)[0].load_age_s == float("inf")
    feed.apply(speaker(epoch=3, incarnation=12).heartbeat())
    assert feed.mirror.pools(feed.now)[0].load_age_s == 0.0


def test_a_load_that_was_long_on_its_way_is_as_old_as_it_was_looked_at() -> None:
    feed, one = Feed(), speaker()
    feed.load(one)
    feed.apply(one.heartbeat(told_at=2000.0))
    feed.now += 1.0
    feed.apply(one.heartbeat(ReplicaLoad("r", running=1), told_at=2000.75))
    view = feed.mirror.pools(feed.now)[0]
    assert (view.age_s, view.load_age_s, view.replicas[0].running) == (0.0, 0.25, 1)
    # Another epoch is another process, and its clock another.
    feed.apply(speaker(epoch=2).heartbeat(told_at=7.0))
    assert feed.mirror.pools(feed.now)[0].load_age_s == 0.0


def test_depths_are_those_of_match_by_slot() -> None:
    feed = Feed()
    for number in range(5):
        one = speaker(f"pool-{number}")
        one.held = list(range(10 * number))
        feed.load(one)
        feed.apply(one.heartbeat())
    keys = [key(number) for number in range(35)]
    depths = feed.mirror.depths(b"".join(keys))
    by_name = {view.pool: int(depths[view.slot]) for view in feed.mirror.pools(feed.now)}
    assert by_name == feed.mirror.match(keys) == {f"pool-{number}": min(35, 10 * number) for number in range(5)}


def test_a_pool_that_is_not_whole_has_the_slot_of_nobody() -> None:
    feed, one, two = Feed(), speaker("a"), speaker("b")
    one.held = two.held = [1, 2]
    for each in (one, two):
        feed.load(each)
        feed.apply(each.heartbeat())
    feed.apply(Batch(one.writer, 1, b"", b"", 7))
    first, second = feed.mirror.pools(feed.now)
    depths = feed.mirror.depths(packed([1, 2]))
    assert (first.whole, first.slot, depths[first.slot]) == (False, 0, 0)
    assert (second.whole, depths[second.slot]) == (True, 2)
    assert depths.sum() == 2


def test_the_version_tells_when_pools_must_be_looked_at_again() -> None:
    feed, one = Feed(), speaker()
    versions = [feed.mirror.version]

    def changed() -> bool:
        versions.append(feed.mirror.version)
        return versions[-1] != versions[-2]

    feed.load(one)
    assert changed()  # a pool
    feed.apply(one.heartbeat())
    assert changed()  # it is in the view
    feed.apply(one.heartbeat(ReplicaLoad("r")))
    feed.apply(one.batch(added=[1]))
    assert not changed()
    feed.load(one)
    assert changed()  # another slot
    missing = one.batch(added=[2])
    feed.apply(one.batch(added=[3]))
    assert changed()  # not whole
    feed.apply(missing)
    assert not changed()
    new = speaker(epoch=2)
    feed.apply(new.heartbeat())
    assert changed()  # another writer
    feed.apply(Gone(new.writer, 0))
    assert changed()
    feed.apply(Gone(new.writer, 0))
    assert not changed()


def test_heartbeats_are_named() -> None:
    feed, one, two = Feed(), speaker("a"), speaker("b")
    for each in (one, two, one):
        feed.apply(each.heartbeat())
    feed.apply(one.batch())
    assert feed.mirror.beats == 3
    assert feed.mirror.beaten_since(1) == ("b", "a")


def test_one_pool_can_be_looked_at_alone() -> None:
    feed, one = Feed(), speaker()
    assert feed.mirror.view("pool-0", feed.now) is None
    feed.load(one)
    assert feed.mirror.view("pool-0", feed.now) is None  # not heard yet
    feed.apply(one.heartbeat(ReplicaLoad("r"), lease_s=1.0))
    assert [feed.mirror.view("pool-0", feed.now)] == feed.mirror.pools(feed.now)
    assert feed.mirror.view("pool-0", feed.now + 1.5) is None


def test_a_large_snapshot_takes_the_place_of_the_old_keys_when_it_is_complete() -> None:
    """Also one that turns out to be wrong at its end: then nothing is known of the pool, and nothing of it was ever seen."""
    seen: list[tuple[int, int]] = []
    feed, one = Feed(), speaker()
    asked = [key(number) for number in range(20_000)]

    def look() -> None:
        depths = feed.mirror.depths(b"".join(asked))
        seen.append((int(depths.max()), feed.mirror.match(asked[:20])["pool-0"]))

    feed.mirror = Mirror(give_way=look)
    one.held = list(range(10))
    feed.load(one)
    feed.apply(one.heartbeat())
    one.held = list(range(20_000))
    one.seq += 1
    feed.load(one)
    assert seen == [(10, 10)] * len(seen)
    assert len(seen) >= 4
    assert feed.mirror.match(asked) == {"pool-0": 20_000}
    good = one.snapshot()
    wrong = Snapshot(good.writer, good.seq, good.keys + packed([19_999]), good.digest)
    assert not feed.mirror.load(StoredSnapshot(wrong, feed.position), feed.now)
    assert feed.mirror.match(asked) == {}
    assert max(depth for depth, _ in seen) == 20_000
    assert feed.mirror.depths(b"".join(asked)).sum() == 0


def test_memory_is_given_back_with_the_entries_that_follow() -> None:
    feed, one, other = Feed(), speaker("a"), speaker("b")
    empty = feed.mirror.memory_bytes()
    one.held = list(range(30_000))
    feed.load(one)
    assert 38 * 30_000 < feed.mirror.memory_bytes() < 64 * 30_000 + empty
    feed.apply(one.heartbeat())
    feed.apply(Gone(one.writer, 0))
    for _ in range(30):
        feed.apply(other.heartbeat())
    assert feed.mirror.memory_bytes() <= empty


def test_more_pools_than_one_word_of_slots() -> None:
    feed = Feed()
    held = {f"pool-{number}": number % 50 for number in range(200)}
    for name, count in held.items():
        one = speaker(name)
        one.held = list(range(count))
        feed.load(one)
        feed.apply(one.heartbeat())
    assert feed.mirror.match([key(number) for number in range(60)]) == held


def test_torn_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Mirror().depths(bytes(15))
