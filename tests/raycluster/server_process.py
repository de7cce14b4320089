"""`kvatlas serve` as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Server:
    """A `kvatlas serve` process. Its output is collected as it comes."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        command = [sys.executable, "-m", "cluster.cli.main", "serve", *arguments]
        # A session of its own, as a shell gives a foreground job a process group: a signal to it is Ctrl-C.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def wait(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        assert self.process.stdout is not None
        self._reader.join(5)
        self.process.stdout.close()


def clean_environment(directory: Path) -> dict[str, str]:
    """Our environment without settings of kvatlas and Ray, with the state files of servers in `directory`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVATLAS_", "RAY_", "XDG_"))}
    kept.pop("OMP_NUM_THREADS", None)
    return kept | {"KVATLAS_RUNTIME_DIR": str(directory / "run"), "PYTHONPATH": str(ROOT)}


def regions() -> set[str]:
    """Names of the regions in shared memory."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("kvatlas-")}
