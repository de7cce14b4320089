"""What every directory must do: snapshots, and what a mirror makes of what it reads."""

from __future__ import annotations

import random
import threading

from kvpool.directory import (
    Snapshot,
    Writer,
)
from kvpool.directory.digest import digest_of
from kvpool.directory.messages import split_keys
from tests.contract.conftest import Backend
from tests.fakes.listener import Listener
from tests.fakes.speaker import Speaker, key, packed

# Snapshots


def test_a_big_snapshot_goes_in_chunks(backend: Backend) -> None:
    keys = random.Random(1).randbytes(16 * 150_001)
    writer = Writer("pool-0", 1, 2)
    backend.writer().open(Snapshot(writer, 0, keys, digest_of(keys)))
    stored = backend.reader().snapshot("pool-0")
    assert stored is not None
    assert stored.snapshot == Snapshot(writer, 0, keys, digest_of(keys))
    listener = Listener(backend.reader()).follow()
    assert listener.difference(set(split_keys(keys))) == ""


def test_a_pool_and_its_snapshot_agree_on_the_position(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    reader = backend.reader()
    for number in range(3):
        speaker.say(added=[10 + number])
        position = speaker.end.replace_snapshot(speaker.snapshot())
        stored, (info,) = reader.snapshot("pool-0"), reader.pools()
        assert stored is not None
        assert stored.at == info.at == position == reader.tip().newest
        assert stored.snapshot.seq == info.seq == speaker.seq


def test_no_reader_sees_half_a_snapshot(backend: Backend) -> None:
    end, writer = backend.writer(), Writer("pool-0", 1, 2)
    sets = [random.Random(seed).randbytes(16 * 8000) for seed in range(2)]
    snapshots = [Snapshot(writer, 0, keys, digest_of(keys)) for keys in sets]
    end.open(snapshots[0])
    stop = threading.Event()

    def swap() -> None:
        turn = 0
        while not stop.wait(0.001):
            turn += 1
            end.replace_snapshot(snapshots[turn % 2])

    thread = threading.Thread(target=swap)
    thread.start()
    reader = backend.reader()
    try:
        for _ in range(30):
            stored = reader.snapshot("pool-0")
            assert stored is not None
            assert stored.snapshot in snapshots
    finally:
        stop.set()
        thread.join()


def test_a_snapshot_with_a_wrong_digest_is_not_believed(backend: Backend) -> None:
    writer = Writer("pool-0", 1, 2)
    end = backend.writer()
    end.open(Snapshot(writer, 0, packed([1, 2]), 12345))
    listener = Listener(backend.reader()).follow()
    assert listener.mirror.keys("pool-0") == set()
    assert listener.mirror.counts["digest_mismatches"] >= 1
    right = Speaker(end, epoch=2, incarnation=1)
    right.held = [1, 2]
    end.replace_snapshot(right.snapshot())
    right.beat()
    assert listener.catch_up().difference(right.keys) == ""


# The mirror's side of it


def test_a_new_writer_voids_the_old_keys_at_once(backend: Backend) -> None:
    Speaker(backend.writer(), incarnation=11).open([1, 2]).beat()
    listener = Listener(backend.reader()).follow()
    new = Speaker(backend.writer(), incarnation=12, epoch=2).open([2, 3])
    new.beat()
    listener.follow(1)
    assert listener.mirror.match([key(1)]) == {}
    assert listener.follow().difference({key(2), key(3)}) == ""
    assert listener.mirror.counts["replaced_writers"] == 1


def test_a_wrong_digest_drops_the_pool_and_reads_it_again(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    listener = Listener(backend.reader()).follow()
    batch = speaker.batch(added=[2])
    speaker.end.write(type(batch)(batch.writer, batch.seq, b"", packed([3]), batch.digest))
    listener.follow(1)
    assert listener.mirror.counts["digest_mismatches"] == 1
    assert listener.mirror.keys("pool-0") == set()
    speaker.end.replace_snapshot(speaker.snapshot())
    speaker.beat()
    assert listener.catch_up().difference({key(1), key(2)}) == ""


def test_a_silent_pool_is_suspected_and_then_left_out(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    listener = Listener(backend.reader()).follow()
    speaker.beat(lease_s=3.0)
    states = []
    for wait in (0.0, 0.4, 0.2, 2.3, 0.2):
        listener.now += wait
        view = listener.follow(1).view()
        states.append(view.state if view else None)
    assert states == ["live", "live", "suspect", "suspect", None]
    speaker.beat()
    view = listener.follow(1).view()
    assert view is not None
    assert view.whole  # it was only paused
    assert listener.difference({key(1)}) == ""


def test_a_pool_that_was_not_heard_is_not_routed_to(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    speaker.beat()
    listener = Listener(backend.reader()).follow()
    assert listener.difference({key(1)}) == ""
    assert listener.view() is None
    assert listener.mirror.match([key(1)]) == {}
    speaker.beat()
    assert listener.follow().mirror.match([key(1)]) == {"pool-0": 1}
