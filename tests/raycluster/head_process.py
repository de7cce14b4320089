"""A local Ray cluster as an operator starts one: `ray start --head --block`, and the `serve` command against its dashboard.

It is a process in a session of its own, on free ports, with its files in a directory of its own. So it shares nothing with other
clusters of this machine, and can be ended by the ids of its processes: `ray stop` would end those of everybody.

Limits: Linux. One node. Every port is free when it is chosen, but not held until Ray takes it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from cluster import ports
from cluster.ray_cluster import SIDE_PORTS

_BIN = Path(sys.executable).parent
# Below the ports that the kernel gives to connections and Ray's workers, and below those that Serve gives to ingress replicas.
_PORTS = range(20_000, 30_000)
_PORT_OPTIONS = (
    "--port",
    "--dashboard-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--ray-client-server-port",
    "--metrics-export-port",
    "--node-manager-port",
    "--object-manager-port",
)
_PORT_VARIABLES = (*SIDE_PORTS, "DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT")


class PortSource:
    """Ports that are free now, each given once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._given: set[int] = set()

    def take(self) -> int:
        """A port that nothing on this machine listens on."""
        while True:
            port = self._rng.choice(_PORTS)
            if port not in self._given and ports.choose("0.0.0.0", port) == port:
                self._given.add(port)
                return port


class Head:
    """One cluster of one node, used once: `start()`, then `close()`."""

    def __init__(self, directory: Path, env: dict[str, str], source: PortSource, **options: object) -> None:
        """Its files go into `directory`, whose path must be short: Ray makes unix sockets there.

        `env` is the environment of all its processes, with RAY_AUTH_TOKEN; the ports that Ray takes from there are added.
        `options` are further ones of `ray start`, as `num_cpus=4`.
        """
        self.directory = directory
        self.env = env | {name: str(source.take()) for name in _PORT_VARIABLES}
        given: dict[str, object] = {name: source.take() for name in _PORT_OPTIONS}
        self.dashboard = f"http://127.0.0.1:{given['--dashboard-port']}"
        self._command = [str(_BIN / "ray"), "start", "--head", "--block", "--temp-dir", str(directory / "ray")]
        given |= {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        self._command += [word for name, value in given.items() for word in (name, str(value))]
        self._log = directory / "head.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until its dashboard takes orders for Serve."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process = self._process

        def is_up() -> bool:
            assert process.poll() is None, self._log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                return self._get().status_code == 200
            return False

        wait_until(is_up, 120, self._log.read_text)

    def serve(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Ray's own `serve WORDS -a DASHBOARD`."""
        command = [str(_BIN / "serve"), *words, "-a", self.dashboard]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)

    def applications(self) -> str:
        """The body of `GET /api/serve/applications/`: what the dashboard shows of Serve."""
        answer = self._get()
        answer.raise_for_status()
        return answer.text

    def application(self, name: str) -> dict[str, Any]:
        """The part of it that tells of one application."""
        found: dict[str, Any] = self._get().raise_for_status().json()["applications"][name]
        return found

    def _get(self) -> httpx.Response:
        token = {"authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        return httpx.get(f"{self.dashboard}/api/serve/applications/", headers=token, timeout=30)

    def processes(self) -> dict[int, str]:
        """Command lines of its living processes by id: of its session, or with its directory in their environment."""
        return dict(self._processes())

    def _processes(self) -> Iterator[tuple[int, str]]:
        if self._process is None:
            return
        marker = os.fsencode(self.directory)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # it has just ended
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state == "Z":
                    continue
                if int(session) == self._process.pid or marker in (entry / "environ").read_bytes():
                    yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()

    def files(self) -> Iterator[Path]:
        """Every file that its processes have written and still have: logs of all kinds, and what the head said."""
        yield self._log
        for path in (self.directory / "ray").rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path

    def close(self) -> dict[int, str]:
        """Take Serve down, then end the cluster. Returns the processes that had to be killed; idempotent."""
        process = self._process
        if process is None:
            return {}
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.serve("shutdown", "-y")
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), 20)
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        self._process = None
        return left


def wait_until(check: Callable[[], bool], seconds: float, context: Callable[[], object] = str) -> None:
    """Returns once `check` is true; an AssertionError with `context` when it is not in time."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, context()
        time.sleep(0.2)
