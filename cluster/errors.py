"""What the command line and the configuration can refuse. The root of the tree is `kvpool.errors.KvatlasError`."""

from __future__ import annotations

from kvpool.errors import KvatlasError


class UsageError(KvatlasError):
    """Something the person who gave the command can put right; the message is one sentence with the fix (exit code 2)."""


class ServeFailed(KvatlasError):
    """The cluster did not come up or went away, for a reason other than the command (exit code 1)."""
