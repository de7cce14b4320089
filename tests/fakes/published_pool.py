"""A pool with its publishers, in the test's own time, and the end of a directory that can be cut off."""

from __future__ import annotations

import random
from pathlib import Path

from kvpool import words
from kvpool.control import Control
from kvpool.directory import (
    Bounds,
    DirectoryUnavailable,
    DirectoryWriter,
    Message,
    PoolLoad,
    ReplicaLoad,
    Snapshot,
    WriteRefused,
)
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


class Role:
    """A lock as a region's: whoever asks first has it, until it is freed."""

    def __init__(self) -> None:
        self.holder = ""

    def ask(self, who: str) -> bool:
        """Takes it if it is free; whether `who` has it."""
        self.holder = self.holder or who
        return self.holder == who

    def free(self) -> None:
        """As at the death of its holder."""
        self.holder = ""


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
        self.load = PoolLoad(capacity_blocks, (ReplicaLoad(f"{name}#replica"),))
        self.allowed = True
        self.role = Role()
        self.lost: list[WriteRefused] = []
        self.writer = CutWriter(writer)
        self.settings = settings
        self.bounds = bounds
        self._seed = seed
        self._rivals: list[tuple[Publisher, Control]] = []
        self.begin()

    def begin(self) -> None:
        """A publisher begins its life, and has the role."""
        self.role.holder = f"publisher {self._seed}"
        self.control = self.rig.region.control()
        self.publisher = self._publisher(self.control, self.writer)

    def end(self, goodbye: bool = True) -> None:
        """The publisher's life ends."""
        self.publisher.close(goodbye)
        self.control.release()
        self.role.free()

    def replace(self) -> None:
        """Another process takes over from the publisher, which was only stopped and may still be stepped (`step_replaced`)."""
        self._rivals.append((self.publisher, self.control))
        self.begin()

    def step_replaced(self) -> None:
        """Those that were replaced go on."""
        for publisher, _ in self._rivals:
            publisher.step()

    def rival(self, writer: DirectoryWriter) -> Publisher:
        """The publisher of another process that is attached to the region, for the test to step."""
        control = self.rig.region.control()
        publisher = self._publisher(control, writer)
        self._rivals.append((publisher, control))
        return publisher

    def _publisher(self, control: Control, writer: DirectoryWriter) -> Publisher:
        who = f"publisher {self._seed}"
        rng = random.Random(self._seed)
        self._seed += 1
        return Publisher(
            control,
            self.name,
            self.rig.region.incarnation,
            writer,
            load=lambda: self.load,
            clock=lambda: self.now,
            rng=rng,
            settings=self.settings,
            bounds=self.bounds,
            may_open=lambda: self.allowed and self.role.ask(who),
            on_fence_lost=self.lost.append,
        )

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
        """Ends publishers and pool, checking the pool."""
        self.end(goodbye=False)
        for publisher, control in self._rivals:
            publisher.close(goodbye=False)
            control.release()
        self.rig.close()
