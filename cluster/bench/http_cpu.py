"""Processor time of the processes of a server, by what they are there for.

All processes below this one are looked at. Ray names those that run replicas of Serve; the rest is told apart by the name of the
program. A process's time is what the kernel counted for it and all its threads, in user and kernel mode.

Limits: Linux, which counts in hundredths of a second: measure for seconds. What a process used before it ended between two looks
is lost, so nothing may end meanwhile.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROXY: Final = "proxy"
REDIS: Final = "redis"
RAY: Final = "ray"
"""Ray's own: raylet, GCS, agents, Serve's controller, workers that wait."""

_REPLICA: Final = "ray::ServeReplica:"
_PROXIES: Final = ("ray::HAProxyManager", "ray::ProxyActor")
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time since the processes began, by role."""

    seconds: Mapping[str, float]

    def since(self, before: Usage) -> dict[str, float]:
        """Seconds used since `before`, by role."""
        return {role: used - before.seconds.get(role, 0.0) for role, used in self.seconds.items()}


def look(root_pid: int, proc: Path = _PROC) -> Usage:
    """What the processes below `root_pid` have used, itself not included."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds: defaultdict[str, float] = defaultdict(float)
    for pid, used in _below(root_pid, proc).items():
        seconds[role_of(_title(pid, proc))] += used / ticks
    return Usage(dict(seconds))


def role_of(title: str) -> str:
    """The role of a process with this command line: `APP:DEPLOYMENT` of a replica of Serve, else one of those above."""
    if title.startswith(_REPLICA):
        app, _, rest = title.removeprefix(_REPLICA).partition(":")
        deployment = rest.replace(".", ":").partition(":")[0].split()
        return f"{app}:{deployment[0] if deployment else ''}"
    program = title.partition(" ")[0].rpartition("/")[2]
    if title.startswith(_PROXIES) or program == "haproxy":
        return PROXY
    return REDIS if program.startswith(("redis-server", "valkey-server")) else RAY


def _below(root_pid: int, proc: Path) -> dict[int, int]:
    """Clock ticks of all descendants of `root_pid`, by process id."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has just ended
            continue
        fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        ticks[pid] = int(fields[11]) + int(fields[12])
    return {pid: used for pid, used in ticks.items() if pid != root_pid and _descends(pid, root_pid, parents)}


def _descends(pid: int, root_pid: int, parents: Mapping[int, int]) -> bool:
    seen: set[int] = set()
    while pid in parents and pid not in seen:  # a number may have been given anew between two reads
        if pid == root_pid:
            return True
        seen.add(pid)
        pid = parents[pid]
    return False


def _title(pid: int, proc: Path) -> str:
    try:
        line = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode("utf-8", errors="replace").strip()
