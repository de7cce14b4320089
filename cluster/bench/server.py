"""A server of the benchmark's own: started, waited for, and stopped on every path.

`kvatlas serve` runs as a child process in a session of its own, so that a Ctrl-C on the terminal reaches only us and we
stop it in order. It has an admin key (random, given through the environment, never printed), a directory of its own for the
state file, a cluster id of its own, and free ports: it meets no other server of the user, not even in a shared Redis. Its
output goes to a file whose last lines are shown when it fails.

A stop is SIGTERM and patience; SIGTERM again on a second Ctrl-C or after `stop_s`; SIGKILL of its process group when that
does not help either. SIGTERM and SIGHUP of our own process take the way of Ctrl-C. Should we be killed outright, the kernel
sends it SIGTERM (`cluster/die_with_parent.py`).

Limits: Linux. Must be used from the main thread, which receives the signals.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from cluster import http_client, ports
from cluster.bench import counters
from cluster.die_with_parent import bound
from cluster.errors import ServeFailed

Command = Callable[[int], Sequence[str]]

HOST = "127.0.0.1"
STOP_S = 60.0
POLL_S = 0.1
# How long the router of a server that is up may take to hear of all replicas. Without its directory it routes as well.
DIRECTORY_S = 30.0
TAIL_LINES = 12
# The benchmark decides these itself; a setting of the person would break the isolation from other servers.
RESERVED = ("cluster.id", "http.host", "http.port", "http.admin_key", "http.admin_key_file", "ray.metrics_port")


def serve_command(
    model: str, policy: str, replicas: int | None, pool_tokens: int | None, settings: Sequence[str]
) -> Command:
    """The command line of `kvatlas serve` for a port. What is empty or None is left to the configuration."""

    def command(port: int) -> list[str]:
        line = [sys.executable, "-m", "cluster.cli.main", "serve"]
        line += [model] if model else []
        line += ["--host", HOST, "--port", str(port)]
        line += ["--replicas", str(replicas)] if replicas is not None else []
        line += ["--pool-tokens", str(pool_tokens)] if pool_tokens is not None else []
        # The last one given wins. What the environment or KVATLAS_CONFIG says of these may clash with our key, or with the
        # ports of a server that runs.
        own = (
            f"router.policy={policy}",
            f"cluster.id=bench-{secrets.token_hex(4)}",
            "http.admin_key_file=",
            "ray.metrics_port=0",
        )
        for setting in (*settings, *own):
            line += ["--set", setting]
        return line

    return command


class Server:
    """A child that serves at `url`. `start` it, `wait_ready`, and `stop` it whatever happened."""

    def __init__(self, command: Command, env: Mapping[str, str], directory: Path) -> None:
        port = ports.choose(HOST, 0)
        self.url = f"http://{HOST}:{port}"
        self.admin_key = secrets.token_urlsafe(32)
        self._command = list(command(port))
        self._log = directory / "output"
        self._env = {
            **env,
            "KVATLAS_HTTP__ADMIN_KEY": self.admin_key,
            "KVATLAS_RUNTIME_DIR": str(directory / "run"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child; returns at once. Raises `ServeFailed` when the machine starts no process."""
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    bound(self._command, signal.SIGTERM, os.getpid()),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
        except OSError as error:
            raise ServeFailed(
                f"Cannot start a server to measure ({error}): check the Python environment and the machine's limits."
            ) from error

    def wait_ready(self, replicas: int, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Wait until the server lists `replicas` replicas, and, for a while longer, until its router hears of them.

        Raises `ServeFailed` when it ends, or after `limit_s`.
        """
        deadline = clock() + limit_s
        up_at: float | None = None
        while True:
            self.require_running("before it was ready")
            with contextlib.suppress(ServeFailed):  # until something listens
                answer = http_client.get(f"{self.url}/debug/state", 5.0, self.admin_key)
                state = counters.parse(answer.body)
                if state.has(replicas):
                    up_at = clock() if up_at is None else up_at
                    if state.routes_to(replicas) or clock() - up_at >= DIRECTORY_S:
                        return
            if clock() >= deadline:
                raise ServeFailed(
                    f"The server to measure was not ready after {limit_s:g} s: raise ray.start_timeout_s with --set for a "
                    f"large model.{self._last_lines()}"
                )
            time.sleep(POLL_S)

    def require_running(self, when: str) -> None:
        """Raise `ServeFailed` with the child's last words when it has ended."""
        assert self._process is not None, "started before"
        code = self._process.poll()
        if code is None:
            return
        lines = self._tail()
        if lines and lines[-1].startswith("kvatlas: "):
            raise ServeFailed(f"The server to measure ended {when}: {lines[-1].removeprefix('kvatlas: ')}")
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise ServeFailed(
            f"The server to measure ended {when} ({how}): run `kvatlas serve` with the same options to see why."
            f"{self._last_lines()}"
        )

    def stop(self, stop_s: float = STOP_S) -> None:
        """End the child and wait until it is gone; an interrupt meanwhile hurries it, and is raised at the end."""
        process = self._process
        if process is None:
            return
        interrupt: KeyboardInterrupt | None = None
        for _ in range(2):
            if process.poll() is not None:
                break
            try:
                process.send_signal(signal.SIGTERM)
                process.wait(stop_s)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt as error:
                interrupt = error
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its session's: it leads the group
            process.wait()
        if interrupt is not None:
            raise interrupt

    def _tail(self) -> list[str]:
        """The last lines of the child's output that are not blank."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[-8192:].decode(errors="replace").replace(self.admin_key, "***")
            return [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL_LINES:]
        return []

    def _last_lines(self) -> str:
        lines = self._tail()
        return "".join(f"\n  {line}" for line in ["Its last lines:", *lines]) if lines else ""


@contextlib.contextmanager
def serving(
    command: Command, replicas: int, env: Mapping[str, str], limit_s: float, stop_s: float = STOP_S
) -> Iterator[Server]:
    """A server that is ready, for the body's time. Raises `ServeFailed` when it does not come up, or ended meanwhile."""
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as directory, signals_as_interrupts():
        server = Server(command, env, Path(directory))
        try:
            server.start()
            server.wait_ready(replicas, limit_s)
            yield server
            server.require_running("while it was measured")
        finally:
            server.stop(stop_s)


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """While the body runs, SIGTERM and SIGHUP do what SIGINT does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):  # asyncio has its own, which cancels in order
        handler(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt
