"""What the routers of one space tell each other: a log of their own beside that of the pools, and claims.

The log. Entries are bytes to it (`router_messages.py` says which) and have the positions 1, 2, 3, ...; it is bounded, and what
falls off its end, or another log in its place, shows as LogGap. There is no fence: a router speaks only for itself. When
nobody appends for `retention_s`, the log is forgotten.

Claims. A claim is held by one holder at a time, until that releases it or its life ends; renewing gives it a new life. Only
the holder can renew and release.

Both block, are used by one thread each, and raise DirectoryUnavailable when the server does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.directory.backend import Cursor, Tip


@dataclass(frozen=True, slots=True)
class ExchangeBounds:
    """`log_entries`: how many the log keeps (or a few more). `retention_s`: how long it is kept when nobody appends."""

    log_entries: int = 4096
    retention_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Heard:
    """What followed a cursor, oldest first, and the cursor to go on with."""

    entries: tuple[bytes, ...]
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Claim:
    """`holder` wants, or has, `key` to itself."""

    key: bytes
    holder: str


class Exchange(Protocol):
    """The log of the routers."""

    def append(self, entries: Sequence[bytes]) -> None:
        """Appends all of `entries`, next to each other, in one step."""
        ...

    def tip(self) -> Tip:
        """Returns where the log is now; life "" while there is none."""
        ...

    def read(self, cursor: Cursor, timeout_s: float) -> Heard:
        """Returns entries after `cursor`, waiting up to `timeout_s` for the first. Raises LogGap."""
        ...

    def close(self) -> None:
        """Lets go of connections. Idempotent."""
        ...


class ClaimStore(Protocol):
    """Who holds which claim. All claims of one call go over in one round trip."""

    def take(self, claims: Sequence[Claim], life_s: float) -> list[str]:
        """Takes each claim that nobody holds; returns who holds each now."""
        ...

    def renew(self, claims: Sequence[Claim], life_s: float) -> None:
        """Gives those that are still held by their holder a new life."""
        ...

    def release(self, claims: Sequence[Claim]) -> None:
        """Ends those that are still held by their holder."""
        ...

    def close(self) -> None:
        """Lets go of connections. Idempotent."""
        ...
