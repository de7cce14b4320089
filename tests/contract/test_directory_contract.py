"""What every directory must do, whatever it is made of: the fence, isolation, the log."""

from __future__ import annotations

import threading
import time

import pytest

from kvpool.directory import (
    Cursor,
    LogGap,
    ReplicaLoad,
    Space,
    WriteRefused,
)
from kvpool.directory.messages import encode
from tests.contract.conftest import SPACE, Backend
from tests.fakes.listener import Listener
from tests.fakes.speaker import Speaker, key

# From a writer to a mirror


def test_a_batch_reaches_the_mirror(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    listener = Listener(backend.reader()).follow()
    speaker.say(added=[1, 2, 3])
    speaker.say(added=[4], removed=[3])
    assert listener.follow().difference({key(1), key(2), key(4)}) == ""
    assert listener.mirror.match([key(1), key(2), key(3)]) == {"pool-0": 2}


def test_snapshot_and_tail_make_the_truth(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1, 2])
    speaker.say(added=[3])
    speaker.end.replace_snapshot(speaker.snapshot())
    speaker.say(added=[4, 5])
    speaker.say(removed=[5])
    speaker.beat()
    listener = Listener(backend.reader()).follow()
    assert listener.difference(speaker.keys) == ""
    assert listener.mirror.counts["duplicates"] == 0


def test_load_and_replicas_travel(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    listener = Listener(backend.reader()).follow()
    loads = (ReplicaLoad("app#engine#a", 120, 3, 2, 5123.5), ReplicaLoad("app#engine#b", 7, 0, 1, 4000.0))
    speaker.beat(*loads, free_blocks=40)
    view = listener.follow().view()
    assert view is not None
    assert (view.free_blocks, view.replicas, view.state) == (40, loads, "live")


def test_an_empty_pool_is_a_pool(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    listener = Listener(backend.reader()).follow()
    speaker.beat()
    view = listener.follow().view()
    assert view is not None
    assert view.whole
    assert view.key_blocks == 0


# The fence


def test_nobody_writes_before_opening(backend: Backend) -> None:
    assert Speaker(backend.writer()).refused() == "unknown"


def test_a_repeated_batch_is_refused(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    batch = speaker.batch(added=[1])
    speaker.end.write(batch)
    with pytest.raises(WriteRefused, match="expected 2") as caught:
        speaker.end.write(batch)
    assert caught.value.reason == "seq"
    assert not caught.value.fence_lost


def test_a_batch_after_a_lost_one_is_refused(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    speaker.batch(added=[1])
    assert speaker.refused() == "seq"


def test_reordered_batches_are_refused(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    first, second = speaker.batch(added=[1]), speaker.batch(added=[2])
    with pytest.raises(WriteRefused):
        speaker.end.write(second)
    speaker.end.write(first)
    speaker.end.write(second)
    listener = Listener(backend.reader()).follow()
    assert listener.difference(speaker.keys) == ""


def test_a_heartbeat_carries_the_last_number(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    speaker.say(added=[1])
    speaker.beat()
    speaker.seq = 0
    with pytest.raises(WriteRefused) as caught:
        speaker.beat()
    assert caught.value.reason == "seq"


def test_a_dead_incarnation_is_refused(backend: Backend) -> None:
    old = Speaker(backend.writer(), incarnation=11).open([1])
    Speaker(backend.writer(), incarnation=12).open([2])
    assert old.refused() == "incarnation"


def test_an_old_epoch_is_refused(backend: Backend) -> None:
    old = Speaker(backend.writer(), epoch=1).open([1])
    Speaker(backend.writer(), epoch=2).open([1])
    with pytest.raises(WriteRefused) as caught:
        old.beat()
    assert caught.value.reason == "epoch"
    assert caught.value.fence_lost


def test_nonces_are_compared_to_the_last_bit(backend: Backend) -> None:
    high = (1 << 64) - 1
    old = Speaker(backend.writer(), incarnation=high, epoch=high).open()
    Speaker(backend.writer(), incarnation=high, epoch=high - 1).open()
    assert old.refused() == "epoch"
    Speaker(backend.writer(), incarnation=high - 1, epoch=high).open()
    assert old.refused() == "incarnation"


def test_a_refused_write_leaves_no_trace(backend: Backend) -> None:
    old = Speaker(backend.writer(), epoch=1).open([1])
    new = Speaker(backend.writer(), epoch=2).open([1, 2])
    new.beat()
    reader = backend.reader()
    before = (reader.tip(), reader.pools(), reader.snapshot("pool-0"))
    old.refused()
    with pytest.raises(WriteRefused):
        old.end.replace_snapshot(old.snapshot())
    with pytest.raises(WriteRefused):
        old.leave()
    assert (reader.tip(), reader.pools(), reader.snapshot("pool-0")) == before


def test_a_snapshot_of_another_number_is_refused(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    early = speaker.snapshot()
    speaker.say(added=[2])
    with pytest.raises(WriteRefused) as caught:
        speaker.end.replace_snapshot(early)
    assert caught.value.reason == "seq"


def test_whoever_opens_last_has_the_fence(backend: Backend) -> None:
    one, two = Speaker(backend.writer(), epoch=1).open(), Speaker(backend.writer(), epoch=2).open()
    assert one.refused() == "epoch"
    three = Speaker(backend.writer(), epoch=3).open()
    assert two.refused() == "epoch"
    three.say(added=[1])


def test_a_goodbye_ends_the_fence(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    listener = Listener(backend.reader()).follow()
    speaker.beat()
    assert listener.follow().view() is not None
    speaker.leave()
    assert listener.follow().view() is None
    assert listener.mirror.keys("pool-0") == set()
    reader = backend.reader()
    assert reader.pools() == []
    assert reader.snapshot("pool-0") is None
    assert speaker.refused() == "unknown"
    Listener(backend.reader()).follow().follower.step(0.001)


# Isolation


def test_two_pools_know_nothing_of_each_other(backend: Backend) -> None:
    one = Speaker(backend.writer(), "pool-0", 11).open([1])
    two = Speaker(backend.writer(), "pool-1", 12).open([1, 2])
    listener = Listener(backend.reader()).follow()
    one.say(added=[5])
    two.say(removed=[2])
    one.say(added=[6])
    listener.follow()
    assert listener.difference({key(1), key(5), key(6)}, "pool-0") == ""
    assert listener.difference({key(1)}, "pool-1") == ""
    two.leave()
    assert listener.follow().difference(one.keys, "pool-0") == ""
    assert listener.mirror.match([key(1), key(5)]) == {"pool-0": 2}


@pytest.mark.parametrize(
    "other",
    [Space("other", "ab" * 16, 16), Space("cluster", "cd" * 16, 16), Space("cluster", "ab" * 16, 32)],
    ids=["cluster", "model", "block size"],
)
def test_two_spaces_share_nothing(backend: Backend, other: Space) -> None:
    here = Speaker(backend.writer(), epoch=1).open([1])
    there = Speaker(backend.writer(other), epoch=2).open([2])
    here.say(added=[3])
    there.say(added=[4])
    here.beat()
    there.beat()
    assert Listener(backend.reader()).follow().difference({key(1), key(3)}) == ""
    assert Listener(backend.reader(other)).follow().difference({key(2), key(4)}) == ""
    there.leave()
    here.beat()


def test_positions_have_no_holes_with_many_writers(backend: Backend) -> None:
    speakers = [Speaker(backend.writer(), f"pool-{number}", number).open() for number in range(3)]
    start = backend.reader().tip()

    def talk(speaker: Speaker) -> None:
        for number in range(10):
            speaker.say(added=[number])

    threads = [threading.Thread(target=talk, args=(speaker,)) for speaker in speakers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tail = backend.reader().read(Cursor(start.life, start.newest), 0.01)
    assert [entry.position for entry in tail.entries] == list(range(start.newest + 1, start.newest + 31))


# The log


def test_a_reader_is_woken_by_a_write(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    reader = backend.reader()
    tip = reader.tip()
    timer = threading.Timer(0.05, speaker.say, kwargs={"added": [1]})
    timer.start()
    began = time.monotonic()
    tail = reader.read(Cursor(tip.life, tip.newest), 0.5)
    took = time.monotonic() - began
    timer.join()
    assert len(tail.entries) == 1
    assert tail.cursor.position == tail.newest == tip.newest + 1
    assert took > 0.03


def test_a_reader_with_nothing_to_read_returns(backend: Backend) -> None:
    Speaker(backend.writer()).open().beat()
    reader = backend.reader()
    tip = reader.tip()
    tail = reader.read(Cursor(tip.life, tip.newest), 0.02)
    assert tail.entries == ()
    assert tail.cursor == Cursor(tip.life, tip.newest)


def test_a_cursor_of_another_log_is_a_gap(backend: Backend) -> None:
    Speaker(backend.writer()).open().beat()
    reader = backend.reader()
    tip = reader.tip()
    with pytest.raises(LogGap):
        reader.read(Cursor("another", tip.newest), 0.01)
    with pytest.raises(LogGap):
        reader.read(Cursor(tip.life, tip.newest + 1), 0.01)


def test_the_log_is_bounded_and_a_trimmed_tail_is_a_gap(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    for number in range(150):
        speaker.say(added=[number])
    reader = backend.reader()
    tip = reader.tip()
    assert tip.newest - tip.oldest < 100
    with pytest.raises(LogGap):
        reader.read(Cursor(tip.life, tip.oldest - 2), 0.01)
    assert reader.read(Cursor(tip.life, tip.oldest - 1), 0.01).entries[0].position == tip.oldest


def test_a_reader_that_fell_behind_the_log_reads_snapshots(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    listener = Listener(backend.reader()).follow()
    for number in range(150):
        speaker.say(added=[number])
        if number % 20 == 0:
            speaker.end.replace_snapshot(speaker.snapshot())
    speaker.beat()
    listener.catch_up()
    assert listener.difference(speaker.keys) == ""
    assert listener.follower.counts["gaps"] == 1
    speaker.beat()
    assert listener.follow().view() is not None


def test_a_snapshot_that_the_log_no_longer_reaches_heals_with_the_next(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    for number in range(150):
        speaker.say(added=[number])
    listener = Listener(backend.reader()).follow()
    speaker.beat()
    listener.follow()
    view = listener.view()
    assert view is not None
    assert not view.whole  # nothing is better than half
    assert listener.mirror.match([key(0)]) == {}
    speaker.end.replace_snapshot(speaker.snapshot())
    speaker.beat()
    assert listener.catch_up().difference(speaker.keys) == ""


def test_a_malformed_entry_is_passed_over(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open()
    listener = Listener(backend.reader()).follow()
    for data in (b"", b"\xc1", b"\x91\x02", encode(speaker.heartbeat())[:-1], b"x" * 400_000):
        backend.append(data)
    speaker.say(added=[1])
    assert listener.follow().difference(speaker.keys) == ""
    assert listener.mirror.counts["malformed"] == 5


def test_a_batch_that_was_damaged_shows_as_a_gap(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    listener = Listener(backend.reader()).follow()
    backend.append(b"what was batch 7")
    speaker.seq = 7
    backend.append(encode(speaker.batch(added=[2])))
    listener.follow(1)
    assert listener.mirror.counts["gaps"] == 1
    assert listener.mirror.keys("pool-0") == set()


def test_the_names_say_which_space_it_is() -> None:
    assert SPACE.prefix == "{kvatlas:3:cluster:" + "ab" * 16 + ":16}"
