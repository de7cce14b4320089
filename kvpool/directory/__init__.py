"""Which pool holds which keys, for all processes of a cluster.

    region --(dirty bits)--> shadow --> publisher --(fence, log, snapshots)--> directory --> mirrors

The region is the truth; the directory is a view of it, and a mirror a view of that. Each step can be checked: every batch
carries the digest of the set after it.

Import `publisher`, `memory` or `redis_backend` by name: this package itself needs neither numba nor redis.
"""

from kvpool.directory.backend import (
    Bounds,
    Cursor,
    DirectoryReader,
    DirectoryWriter,
    LogEntry,
    PoolInfo,
    Space,
    StoredSnapshot,
    Tail,
    Tip,
)
from kvpool.directory.errors import DirectoryError, DirectoryUnavailable, LogGap, MalformedEntry, WriteRefused
from kvpool.directory.messages import (
    Batch,
    Gone,
    Heartbeat,
    Message,
    PoolLoad,
    ReplicaLoad,
    Snapshot,
    Writer,
)

__all__ = [
    "Batch",
    "Bounds",
    "Cursor",
    "DirectoryError",
    "DirectoryReader",
    "DirectoryUnavailable",
    "DirectoryWriter",
    "Gone",
    "Heartbeat",
    "LogEntry",
    "LogGap",
    "MalformedEntry",
    "Message",
    "PoolInfo",
    "PoolLoad",
    "ReplicaLoad",
    "Snapshot",
    "Space",
    "StoredSnapshot",
    "Tail",
    "Tip",
    "WriteRefused",
    "Writer",
]
