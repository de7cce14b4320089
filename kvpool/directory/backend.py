"""What a directory must be able to do: the two sides of it, and the values they exchange.

A space is a directory of its own: one cluster, one model, one block size. Inside it there is one log for all pools, whose
entries have the positions 1, 2, 3, ..., and for each pool a fence and a snapshot.

Fence. `open` makes a writer the only one of its pool; from then on every write of another one is refused, for good. A
write must carry the right number (a batch the next one, everything else the current one), so a lost, repeated or
reordered batch is refused as well. Which writer is right is not for the directory to know: the last one to open is.

Reading. A new reader takes the `tip`, then each pool's snapshot with the position `at` which it was taken, then reads the
log from the lowest `at` on, passing over what it has. The log is bounded: what falls off its end shows as LogGap.

Forgetting. A pool without a heartbeat for `retention_s` is forgotten, snapshot and fence; when it speaks again
the answer is "unknown", and it opens anew.

Both sides block, are used by one thread each, and raise DirectoryUnavailable when the directory does not answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from kvpool.directory.errors import MalformedEntry
from kvpool.directory.messages import VERSION, Message, Snapshot, Writer


@dataclass(frozen=True, slots=True)
class Space:
    """Names a directory: `model_fingerprint` in hexadecimal. Two spaces share nothing. ValueError for odd names."""

    cluster_id: str
    model_fingerprint: str
    block_tokens: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.cluster_id):
            raise ValueError(f"a cluster id has 1 to 64 of A-Z a-z 0-9 . _ -, got {self.cluster_id!r:.80}")
        if not re.fullmatch(r"[0-9a-f]{8,128}", self.model_fingerprint) or self.block_tokens < 1:
            raise ValueError(
                f"a space needs a fingerprint in hexadecimal and a block size, "
                f"got {self.model_fingerprint!r:.80} and {self.block_tokens}"
            )

    @property
    def prefix(self) -> str:
        """What every name in this directory begins with; the braces keep them together on one server."""
        return f"{{kvatlas:{VERSION}:{self.cluster_id}:{self.model_fingerprint}:{self.block_tokens}}}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """`log_entries`: how many the log keeps (or a few more). `retention_s`: how long a silent pool is remembered."""

    log_entries: int = 16384
    retention_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Tip:
    """The log now: which one (`life` is a nonce), and the positions of its oldest and newest entry (0: none yet)."""

    life: str
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """`position` is the last entry seen of the log `life`."""

    life: str
    position: int


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A pool with a fence: its writer, the number of its last batch, and the position its snapshot was taken at."""

    writer: Writer
    seq: int
    at: int


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot, and the position `at` which it was taken: it contains exactly the batches up to there."""

    snapshot: Snapshot
    at: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry; `message` is the error when its bytes are none."""

    position: int
    message: Message | MalformedEntry


@dataclass(frozen=True, slots=True)
class Tail:
    """What followed a cursor, the cursor to go on with, and the newest position known."""

    entries: tuple[LogEntry, ...]
    cursor: Cursor
    newest: int


class DirectoryWriter(Protocol):
    """The side of a pool's publisher. Every method but `close` returns the log's newest position."""

    def open(self, snapshot: Snapshot) -> int:
        """Takes the fence of the pool for `snapshot.writer` and stores its snapshot, in one step."""
        ...

    def write(self, message: Message) -> int:
        """Appends `message` to the log if the fence lets it through, else raises WriteRefused. Gone ends the fence."""
        ...

    def replace_snapshot(self, snapshot: Snapshot) -> int:
        """Replaces the pool's snapshot by a newer one in one step. Raises WriteRefused."""
        ...

    def close(self) -> None:
        """Lets go of connections. Idempotent."""
        ...


class DirectoryReader(Protocol):
    """The side of a mirror."""

    def tip(self) -> Tip:
        """Returns where the log is now."""
        ...

    def pools(self) -> list[PoolInfo]:
        """Returns the pools that have a fence, in no order."""
        ...

    def snapshot(self, pool: str) -> StoredSnapshot | None:
        """Returns the pool's snapshot; None when there is none. Raises MalformedEntry when it is damaged."""
        ...

    def read(self, cursor: Cursor, timeout_s: float) -> Tail:
        """Returns entries after `cursor`, waiting up to `timeout_s` for the first. Raises LogGap."""
        ...

    def close(self) -> None:
        """Lets go of connections. Idempotent."""
        ...
