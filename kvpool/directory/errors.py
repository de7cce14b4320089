"""What a directory can refuse, or fail to do."""

from __future__ import annotations

from kvpool.errors import KvatlasError


class DirectoryError(KvatlasError):
    """Anything that goes wrong between a pool, the directory and a mirror."""


class DirectoryUnavailable(DirectoryError):
    """The directory does not answer, or cannot do what it is there for just now. Trying again later may help."""


class MalformedEntry(DirectoryError):
    """Bytes read from the directory are not a message of this version within the stated bounds."""


class LogGap(DirectoryError):
    """What followed the cursor is no longer in the log, or the log is another one: read the snapshots again."""


class WriteRefused(DirectoryError):
    """The fence did not let a write through; nothing was written.

    `reason` is "unknown" (nobody has the fence), "incarnation" or "epoch" (somebody else has it), or "seq" (it is
    ours, but the number is not the next one). Only the two in the middle mean that this writer is over.
    """

    def __init__(self, pool: str, reason: str, detail: str) -> None:
        super().__init__(pool, reason, detail)
        self.pool = pool
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"the directory refused a write of pool {self.pool!r} ({self.reason}): {self.detail}"

    @property
    def fence_lost(self) -> bool:
        """Whether another writer has taken this pool over."""
        return self.reason in ("incarnation", "epoch")
