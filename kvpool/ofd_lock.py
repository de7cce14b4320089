"""Open-file-description locks: proof that a process lives, kept by the kernel.

A lock belongs to an open file description, not to a process id: it goes when the last descriptor of that description
is closed, so also at SIGKILL, and a process that got a dead one's id holds nothing of it. Locks are byte ranges; they
may lie beyond the end of the file and need not touch its bytes.

A memory mapping keeps the description it was made from alive. Lock through a descriptor of its own, never through the
one that was mapped: else a forked child's mapping would keep the parent's locks.

Limits: Linux (3.15 and later); NFS emulates them differently, so use local file systems. Nothing here ever waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

# Missing from the fcntl module before Python 3.14 or so; the numbers are the kernel's.
F_OFD_GETLK: Final = 36
F_OFD_SETLK: Final = 37

_FLOCK: Final = "hhqqi4x"  # struct flock: type, whence, start, length, pid (must be 0)


def _pack(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


def try_lock(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
    """Locks bytes start .. start+length-1 (length 0: to infinity) of `fd` and returns True; False when another holds
    them.

    An exclusive lock needs a descriptor open for writing. Raises OSError for anything but contention.
    """
    try:
        fcntl.fcntl(fd, F_OFD_SETLK, _pack(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, start: int, length: int) -> None:
    """Gives back bytes start .. start+length-1 (length 0: to infinity); fine when they were not locked."""
    fcntl.fcntl(fd, F_OFD_SETLK, _pack(fcntl.F_UNLCK, start, length))


def is_locked(fd: int, start: int, length: int) -> bool:
    """Whether another open file description holds any lock in the range. True and False may be history at once."""
    answer = fcntl.fcntl(fd, F_OFD_GETLK, _pack(fcntl.F_WRLCK, start, length))
    kind: int = struct.unpack(_FLOCK, answer)[0]
    return kind != fcntl.F_UNLCK
