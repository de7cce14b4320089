"""The directory of a replay: everything arrives, in order, when it is due."""

from __future__ import annotations

from kvpool.directory import Cursor, DirectoryWriter
from router.replay.delayed_directory import DelayedDirectory
from router.replay.simulated_time import SimulatedTime
from tests.fakes.speaker import Speaker


def test_a_write_is_seen_when_its_time_has_come() -> None:
    clock = SimulatedTime()
    directory = DelayedDirectory(0.5, clock)
    end: DirectoryWriter = directory
    speaker = Speaker(end).open([1])
    tip = directory.tip()
    cursor = Cursor(tip.life, tip.newest)
    assert directory.pools()[0].writer == speaker.writer
    speaker.say(added=[2])
    clock.move_to(0.4)
    speaker.say(added=[3])
    assert not directory.read(cursor, 0.0).entries
    clock.move_to(0.5)
    first = directory.read(cursor, 0.0)
    assert [entry.position for entry in first.entries] == [1]
    assert directory.read(cursor, 0.0) == first
    clock.move_to(2.0)
    assert [entry.position for entry in directory.read(first.cursor, 0.0).entries] == [2]
    stored = directory.snapshot(speaker.writer.pool)
    assert stored is not None
    assert (stored.snapshot.seq, stored.at) == (0, 0)
    assert directory.snapshot("other") is None


def test_time_never_goes_back() -> None:
    clock = SimulatedTime()
    clock.move_to(2.0)
    clock.move_to(1.0)
    assert clock() == 2.0
