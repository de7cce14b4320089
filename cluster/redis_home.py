"""The directory of an embedded Redis: private, locked while it is in use, removed with all it holds.

A server whose parent was killed leaves its directory behind. The lock (`flock`) ends with its owner, so the next server finds
the directories that are nobody's and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from cluster.errors import ServeFailed
from cluster.redis_endpoint import OWN_INSTEAD, Endpoint, quoted

LONGEST_SOCKET_BYTES: Final = 107
"""Longest path of a unix socket."""
SOCKET: Final = "redis.sock"
LOG: Final = "redis.log"
_PREFIX: Final = "kvatlas-redis-"
_CONFIG: Final = "redis.conf"

_SETTINGS: Final = """\
daemonize no
loglevel warning
save ""
appendonly no
stop-writes-on-bgsave-error no
maxmemory 256mb
maxmemory-policy noeviction
hz 100
"""


class Home:
    """A directory of our own, locked while it is in use."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @staticmethod
    def make(parent: Path, *, needs_socket: bool) -> Home:
        """Makes one in `parent` (made too, mode 0700), or under the directory for temporary files if a socket needs that.

        Removes those that dead servers left there. Raises ServeFailed, OSError.
        """
        if needs_socket and not _fits(parent):
            parent, given = Path(tempfile.gettempdir()), parent
            if not _fits(parent):
                raise ServeFailed(
                    f"The paths {given} and {parent} are both too long for a unix socket ({LONGEST_SOCKET_BYTES} bytes with the "
                    f"file): set KVATLAS_RUNTIME_DIR to a shorter one, {OWN_INSTEAD}."
                )
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = parent.stat()
        safe = not status.st_mode & 0o022 or status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.getuid()) or not safe:
            raise ServeFailed(
                f"{parent} belongs to another user or others may write to it: remove it, or set KVATLAS_RUNTIME_DIR to a "
                "directory of your own."
            )
        for left in parent.glob(f"{_PREFIX}*"):
            _remove_if_nobodys(left)
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # Until it is locked another server may take it for nobody's. Tools that clean up /tmp respect the lock, too.
            with contextlib.suppress(FileNotFoundError):
                lock = _open_directory(path)
                if _try_lock(lock) and path.exists():
                    return Home(path, lock)
                os.close(lock)

    def write_config(self, endpoint: Endpoint) -> Path:
        """Writes the configuration file, for us alone; returns its path."""
        lines = (*endpoint.directives, f"dir {quoted(self.path)}", f"logfile {quoted(self.path / LOG)}")
        file = self.path / _CONFIG
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as sink:
            sink.write(_SETTINGS + "\n".join(lines) + "\n")
        return file

    def last_words(self, endpoint: Endpoint) -> str:
        """Returns the last line of the log as a clause of a sentence; empty when there is none."""
        try:
            lines = (self.path / LOG).read_bytes()[-4096:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if endpoint.password:  # Redis repeats a line of its configuration that it does not take
            said = said.replace(endpoint.password, "***")
        return f", its last words: {said!r}" if said else ""

    def remove(self) -> None:
        """Removes it with all it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _fits(parent: Path) -> bool:
    longest = parent / f"{_PREFIX}{'x' * 8}" / SOCKET  # mkdtemp adds eight characters
    return len(os.fsencode(longest)) <= LONGEST_SOCKET_BYTES


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _try_lock(directory: int) -> bool:
    """Whether nobody else had the lock. A file system without locks has no owners either: nothing is removed there."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_if_nobodys(path: Path) -> None:
    with contextlib.suppress(OSError):
        directory = _open_directory(path)
        try:
            if os.fstat(directory).st_uid == os.getuid():
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(directory)
