"""Telling one life of a process id from another."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int:
    """Returns when process `pid` started, in clock ticks since boot; 0 when there is no such process (or it is a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return 0 if fields[0] == "Z" else int(fields[19])
