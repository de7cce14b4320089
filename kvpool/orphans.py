"""Removing region files whose users are all dead.

Everyone who has a region open holds a lock on its file (`region.py`), and the kernel drops it at any death. So a
sweep takes each file's whole range exclusively: if it gets it, nobody lives there, and the name goes while the lock
is held. An attacher that opened the file just before finds its own lock refused, or the file without a name, and
reports that; it is never left with a region that somebody else creates anew under the same name.

Process ids play no part, so two lives of a process with the same id cannot be taken for each other.

Limits: only files whose name starts with the given prefix AND that are regions (magic), or regions that were still
being filled (their name says so), are candidates. Files of other users are skipped.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from kvpool import layout as lay
from kvpool import ofd_lock
from kvpool.region_file import CREATING

_log = logging.getLogger(__name__)


def sweep(directory: str | os.PathLike[str], prefix: str) -> list[Path]:
    """Removes every orphaned region in `directory` whose file name starts with `prefix`; returns their paths.

    Logs each one. Raises ValueError for an empty prefix (it would touch other clusters' regions).
    """
    if not prefix:
        raise ValueError("a sweep needs a non-empty name prefix")
    home = Path(directory)
    removed = [home / name for name in sorted(os.listdir(home)) if name.startswith(prefix) and _remove(home / name)]
    for path in removed:
        _log.info("removed the orphaned region %s: nobody had it open", path)
    return removed


def _remove(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # gone meanwhile, not ours, or not a file
        return False
    try:
        if not _is_candidate(fd, path) or not ofd_lock.try_lock(fd, 0, 0):
            return False
        try:
            if os.stat(path).st_ino != os.fstat(fd).st_ino:  # the name means another file by now
                return False
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True
    finally:
        os.close(fd)


def _is_candidate(fd: int, path: Path) -> bool:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    return CREATING in path.name or int.from_bytes(os.pread(fd, 8, 0), "little") == lay.MAGIC
