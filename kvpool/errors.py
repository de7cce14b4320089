"""The root of the exception tree, and what the pool can refuse.

Every error that kvatlas raises on purpose descends from `KvatlasError`, and its message is a sentence for the person
who has to act on it: what happened, the numbers, the fix. All arguments are positional so that instances survive
pickling.
"""

from __future__ import annotations


class KvatlasError(Exception):
    """Anything kvatlas raises on purpose."""


class PoolError(KvatlasError):
    """The pool or its region cannot do what was asked."""


class SharedMemoryTooSmall(PoolError):
    """The shared memory mount cannot hold the region; the message names both sizes and the fix."""


class RegionMismatch(PoolError):
    """A region file is not what the caller expects: wrong magic, layout, geometry or model."""


class SecretFileError(PoolError):
    """The file with the cluster's secret cannot be trusted: wrong size, or readable by others."""


class GuardViolation(PoolError):
    """Guard mode found memory that was written by somebody who should not have; the message names the block."""
