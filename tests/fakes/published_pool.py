"""A pool with its publisher, in the test's own time, and the two ends of a directory that can be cut off."""

from __future__ import annotations

import random
from pathlib import Path

from kvpool import words
from kvpool.directory import Bounds, DirectoryUnavailable, DirectoryWriter, Load, Message, Snapshot, WriteRefused
from kvpool.directory.publisher import Publisher, PublisherSettings
from tests.kvpool.conftest import Rig


class CutWriter:
    """Passes everything on, unless `cut`: "before" loses what is written, "after" only the answer."""

    def __init__(self, inner: DirectoryWriter) -> None:
        self.inner = inner
        self.cut = ""
        self.written: list[Message] = []

    def _through(self) -> None:
        if self.cut == "before":
            raise DirectoryUnavailable("cut off")

    def _back(self, position: int) -> int:
        if self.cut == "after":
            raise DirectoryUnavailable("cut off")
        return position

    def open(self, snapshot: Snapshot) -> int:
        self._through()
        return self._back(self.inner.open(snapshot))

    def write(self, message: Message) -> int:
        self._through()
        position = self.inner.write(message)
        self.written.append(message)
        return self._back(position)

    def replace_snapshot(self, snapshot: Snapshot) -> int:
        self._through()
        return self._back(self.inner.replace_snapshot(snapshot))

    def close(self) -> None:
        self.inner.close()


class PublishedPool:
    """`rig` is the pool, `publisher` what tells of it; `now` moves only when the test moves it."""

    def __init__(
        self,
        directory: Path,
        writer: DirectoryWriter,
        name: str = "pool-0",
        capacity_blocks: int = 16,
        seed: int = 1,
        settings: PublisherSettings | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.rig = Rig(directory, capacity_blocks, 2)
        self.name = name
        self.now = 100.0
        self.load = Load(free_blocks=capacity_blocks)
        self.allowed = True
        self.lost: list[WriteRefused] = []
        self.writer = CutWriter(writer)
        self.settings = settings
        self.bounds = bounds
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        """A publisher begins its life."""
        self.control = self.rig.region.control()
        self.publisher = Publisher(
            self.control,
            self.name,
            self.rig.region.incarnation,
            self.writer,
            load=lambda: self.load,
            replica_ids=lambda: (f"{self.name}#replica",),
            clock=lambda: self.now,
            rng=random.Random(self._seed),
            settings=self.settings,
            bounds=self.bounds,
            may_open=lambda: self.allowed,
            on_fence_lost=self.lost.append,
        )
        self._seed += 1

    def end(self, goodbye: bool = True) -> None:
        """The publisher's life ends."""
        self.publisher.close(goodbye)
        self.control.release()

    def steps(self, count: int = 1, each_s: float = 0.003) -> PublishedPool:
        """Lets the publisher look `count` times, with time going by."""
        for _ in range(count):
            self.now += each_s
            self.publisher.step()
        return self

    def indexed(self) -> set[bytes]:
        """The truth."""
        view = self.rig.region.control()
        keys = {view.key(block) for block, word in enumerate(view.state) if words.state_of(word) == words.INDEXED}
        view.release()
        return keys

    def close(self) -> None:
        """Ends publisher and pool, checking the pool."""
        self.end(goodbye=False)
        self.rig.close()
