"""A publisher that says what the test tells it to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpool.directory import Batch, DirectoryWriter, Gone, Heartbeat, ReplicaLoad, Snapshot, Writer, WriteRefused
from kvpool.directory.digest import digest_of


def key(number: int) -> bytes:
    """The key with this number; not a hash, so that numbers show in failures."""
    return number.to_bytes(16, "big")


def packed(numbers: Sequence[int]) -> bytes:
    """The keys with these numbers, packed."""
    return b"".join(key(number) for number in numbers)


class Speaker:
    """One writer of one pool: keeps number, set and digest right unless told otherwise."""

    def __init__(self, end: DirectoryWriter, pool: str = "pool-0", incarnation: int = 11, epoch: int = 1) -> None:
        self.end = end
        self.writer = Writer(pool, incarnation, epoch)
        self.seq = 0
        self.held: list[int] = []

    @property
    def keys(self) -> set[bytes]:
        """What it has published."""
        return {key(number) for number in self.held}

    @property
    def digest(self) -> int:
        """The digest of what it has published."""
        return digest_of(packed(self.held))

    def snapshot(self) -> Snapshot:
        """What it has published, as a snapshot."""
        return Snapshot(self.writer, self.seq, packed(self.held), self.digest)

    def open(self, held: Sequence[int] = ()) -> Speaker:
        """Takes the fence, with these keys published."""
        self.held = [*self.held, *held]
        self.end.open(self.snapshot())
        return self

    def batch(self, added: Sequence[int] = (), removed: Sequence[int] = ()) -> Batch:
        """The next batch, not sent."""
        self.seq += 1
        self.held = [number for number in self.held if number not in removed] + list(added)
        return Batch(self.writer, self.seq, packed(removed), packed(added), self.digest)

    def say(self, added: Sequence[int] = (), removed: Sequence[int] = ()) -> None:
        """Sends the next batch."""
        self.end.write(self.batch(added, removed))

    def heartbeat(
        self, *replicas: ReplicaLoad, free_blocks: int = 0, lease_s: float = 3.0, told_at: float = 0.0
    ) -> Heartbeat:
        """A heartbeat of a pool that these replicas share, not sent."""
        return Heartbeat(self.writer, self.seq, self.digest, lease_s, free_blocks, replicas, told_at)

    def beat(self, *replicas: ReplicaLoad, free_blocks: int = 0, lease_s: float = 3.0) -> None:
        """Sends a heartbeat."""
        self.end.write(self.heartbeat(*replicas, free_blocks=free_blocks, lease_s=lease_s))

    def leave(self) -> None:
        """Says goodbye."""
        self.end.write(Gone(self.writer, self.seq))

    def refused(self) -> str:
        """Says a batch that must be refused; returns the reason."""
        with pytest.raises(WriteRefused) as caught:
            self.say(added=[999])
        return caught.value.reason
