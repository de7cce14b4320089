from __future__ import annotations

import random
import threading

import pytest

from kvpool.directory import Cursor, DirectoryUnavailable, Space
from kvpool.directory.memory import READ_ENTRIES, MemoryReader, MemoryServer, MemoryWriter
from tests.fakes.speaker import Speaker

SPACE = Space("c", "ab" * 8, 2)


def test_a_read_is_bounded() -> None:
    server = MemoryServer(random.Random(1))
    speaker = Speaker(MemoryWriter(server, SPACE)).open()
    for number in range(READ_ENTRIES + 10):
        speaker.say(added=[number])
    reader = MemoryReader(server, SPACE)
    tail = reader.read(Cursor(reader.tip().life, 0), 0)
    assert len(tail.entries) == READ_ENTRIES
    assert tail.newest - tail.cursor.position == 10


def test_switching_it_off_ends_a_waiting_read() -> None:
    server = MemoryServer(random.Random(1))
    reader = MemoryReader(server, SPACE)
    life = reader.tip().life

    def switch_off() -> None:
        with server.changed:
            server.up = False
            server.changed.notify_all()

    timer = threading.Timer(0.02, switch_off)
    timer.start()
    with pytest.raises(DirectoryUnavailable):
        reader.read(Cursor(life, 0), 5.0)
    timer.join()
