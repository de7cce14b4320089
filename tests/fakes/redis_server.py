"""A Redis of the test's own, on a unix socket in a temporary directory."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import redis

from cluster.embedded_redis import find_binary

__all__ = ["RedisServer", "find_binary"]


class RedisServer:
    """A child process; `start` and `stop` may follow each other on the same socket."""

    def __init__(self, binary: Path, directory: Path, *options: str) -> None:
        self._binary = binary
        self._directory = directory
        self._options = options
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        """Starts it and waits until it answers; data saved in the directory is there again."""
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self._binary), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
                    *("--save", "", "--appendonly", "no", "--dir", str(self._directory), *self._options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 10
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    if time.monotonic() > deadline or self._process.poll() is not None:
                        raise
                    time.sleep(0.005)

    def save(self) -> None:
        """Writes its data to the directory, for the next `start`."""
        with redis.Redis.from_url(self.url) as client:
            client.save()

    def forget(self) -> None:
        """Removes saved data: the next `start` begins empty."""
        (self._directory / "dump.rdb").unlink(missing_ok=True)

    def stop(self) -> None:
        """Kills it, as a crash would; idempotent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        self._socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """Stops its execution, with connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
