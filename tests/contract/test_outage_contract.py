"""What every directory must do when it crashes, hangs, forgets, or comes back with old data."""

from __future__ import annotations

import time

import pytest

from kvpool.directory import (
    Bounds,
    Cursor,
    DirectoryUnavailable,
    DirectoryWriter,
    MalformedEntry,
)
from tests.contract.conftest import Backend
from tests.fakes.listener import Listener
from tests.fakes.speaker import Speaker, key


def test_a_crash_is_one_typed_error(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    reader = backend.reader()
    tip = reader.tip()
    backend.stop()
    for attempt in (
        lambda: speaker.say(added=[2]),
        lambda: speaker.end.open(speaker.snapshot()),
        lambda: speaker.end.replace_snapshot(speaker.snapshot()),
        reader.tip,
        reader.pools,
        lambda: reader.snapshot("pool-0"),
        lambda: reader.read(Cursor(tip.life, tip.newest), 0.01),
    ):
        with pytest.raises(DirectoryUnavailable):
            attempt()


def test_a_restart_with_nothing_left(backend: Backend) -> None:
    end = backend.writer()
    old = Speaker(end).open([1, 2])
    listener = Listener(backend.reader()).follow()
    old.beat()
    listener.follow()
    backend.stop()
    listener.follow(1)
    assert not listener.follower.connected
    assert listener.difference({key(1), key(2)}) == ""  # it lives on what it knows
    backend.start()
    assert old.refused() == "unknown"
    new = Speaker(end, epoch=2).open([2, 3])
    new.beat()
    listener.follow()
    new.beat()
    assert listener.catch_up().difference({key(2), key(3)}) == ""
    view = listener.view()
    assert view is not None
    assert view.epoch == 2


def test_a_restart_with_old_data(backend: Backend) -> None:
    end = backend.writer()
    old = Speaker(end).open([1, 2])
    gone = Speaker(backend.writer(), "pool-9", 99).open([9])
    gone.beat()
    listener = Listener(backend.reader()).follow()
    backend.save()
    old.say(removed=[1])
    listener.follow()
    backend.stop()
    listener.follow(1)
    backend.start()
    assert old.refused() == "seq"
    new = Speaker(end, epoch=2).open([2, 3])
    listener.catch_up()
    new.beat()
    listener.catch_up()
    assert listener.difference({key(2), key(3)}) == ""
    assert listener.mirror.match([key(1)]) == {"pool-0": 0}
    new_listener = Listener(backend.reader()).follow()
    new.beat()
    new_listener.follow()
    assert [view.pool for view in new_listener.mirror.pools(new_listener.now)] == ["pool-0"]
    assert new_listener.mirror.match([key(9)]) == {"pool-0": 0}


def test_a_log_that_was_set_back_and_overtook_the_cursor(backend: Backend) -> None:
    end = backend.writer()
    old = Speaker(end).open([1])
    listener = Listener(backend.reader()).follow()
    backend.save()
    old.say(added=[2])
    listener.follow()
    backend.stop()
    backend.start()
    new = Speaker(end, epoch=2).open([1])
    for number in range(5, 15):
        new.say(added=[number])
    new.beat()
    assert listener.catch_up().difference(new.keys) == ""


def test_a_pause_is_survived(backend: Backend) -> None:
    end = backend.writer()
    speaker = Speaker(end).open([1])
    listener = Listener(backend.reader()).follow()
    speaker.beat()
    listener.follow()
    backend.pause()
    batch = speaker.batch(added=[2])
    with pytest.raises(DirectoryUnavailable):
        end.write(batch)
    listener.follow(1)
    backend.resume()
    again = Speaker(end, epoch=2).open([1, 2])  # whether the batch was taken does not matter
    again.beat()
    listener.catch_up()
    again.beat()
    assert listener.catch_up().difference({key(1), key(2)}) == ""


def test_a_silent_pool_is_forgotten_by_the_directory(backend: Backend) -> None:
    end: DirectoryWriter = backend.writer(bounds=Bounds(log_entries=40, retention_s=0.6))
    speaker = Speaker(end).open([1])
    speaker.beat()
    time.sleep(0.7)
    assert backend.reader().pools() == []
    assert backend.reader().snapshot("pool-0") is None
    assert speaker.refused() == "unknown"
    Speaker(end, epoch=2).open([1]).beat()


def test_a_damaged_snapshot_is_one_typed_error(backend: Backend) -> None:
    speaker = Speaker(backend.writer()).open([1])
    listener = Listener(backend.reader()).follow()
    reader = backend.reader()
    original = reader.snapshot
    assert original("pool-0") is not None

    def damaged(pool: str) -> None:
        raise MalformedEntry("torn")

    listener.follower._reader.snapshot = damaged  # type: ignore[method-assign]
    new = Speaker(speaker.end, epoch=2).open([2])
    new.beat()
    listener.follow()
    view = listener.view()
    assert view is not None
    assert not view.whole
    listener.follower._reader.snapshot = original  # type: ignore[method-assign]
    listener.now += 5.0
    new.beat()
    assert listener.catch_up().difference({key(2)}) == ""
