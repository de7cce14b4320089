"""What a running `kvatlas serve` leaves on disk so that `stop` and `status` find it: one small file per port.

A process id alone proves nothing, ids are reused. The file also has the time the process started, in clock ticks since boot,
and a file whose process is gone or is another one by now is removed when it is met.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.errors import UsageError
from kvpool.process import start_ticks


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server. `start_ticks` is field 22 of /proc/PID/stat; `started` is Unix time; `metrics_url` is empty until ready."""

    pid: int
    start_ticks: int
    host: str
    port: int
    url: str
    metrics_url: str
    model: str
    started: float
    admin_key: str = field(default="", repr=False)


def runtime_dir(env: Mapping[str, str]) -> Path:
    """Directory of the state files; private to the user. Not created here."""
    if env.get("KVATLAS_RUNTIME_DIR"):
        return Path(env["KVATLAS_RUNTIME_DIR"]).expanduser()
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "kvatlas"
    return Path(tempfile.gettempdir()) / f"kvatlas-{os.getuid()}"


def here(host: str, port: int, url: str, model: str, admin_key: str) -> ServerState:
    """The state of this very process, started now; its metrics are not known yet."""
    pid = os.getpid()
    return ServerState(pid, start_ticks(pid), host, port, url, "", model, time.time(), admin_key)


def write(directory: Path, state: ServerState) -> Path:
    """Store `state`, readable by this user only, whole or not at all. Returns its file.

    Raises `UsageError` when the directory is another user's or open to others: it may lie in a shared place such as /tmp.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UsageError(
            f"{directory} belongs to another user or others may write to it: remove it, or set KVATLAS_RUNTIME_DIR to a "
            "directory of your own."
        )
    target = _file(directory, state.port)
    part = target.with_suffix(f".{state.pid}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as sink:
        json.dump(asdict(state), sink)
    part.replace(target)
    return target


def remove(directory: Path, state: ServerState) -> None:
    """Forget `state`, unless the file belongs to another server by now."""
    target = _file(directory, state.port)
    found = _read(target)
    if found is not None and (found.pid, found.start_ticks) == (state.pid, state.start_ticks):
        target.unlink(missing_ok=True)


def running(directory: Path) -> list[ServerState]:
    """Every server of this user that is alive, by port. Removes the files of dead ones."""
    found = []
    for file in sorted(directory.glob("serve-*.json")):
        state = _read(file)
        if state is not None and is_alive(state):
            found.append(state)
        else:
            file.unlink(missing_ok=True)
    return sorted(found, key=lambda state: state.port)


def is_alive(state: ServerState) -> bool:
    """Whether the very process that wrote `state` still runs."""
    return state.start_ticks != 0 and start_ticks(state.pid) == state.start_ticks


def _file(directory: Path, port: int) -> Path:
    return directory / f"serve-{port}.json"


def _read(file: Path) -> ServerState | None:
    try:
        return ServerState(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
