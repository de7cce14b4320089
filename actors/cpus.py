"""How many cores this process may keep busy: those it is allowed to run on, and no more than its container's share of time."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """At least 1. A container's limit counts whole cores, the last one even where it is only part of one."""
    allowed = len(os.sched_getaffinity(0))
    limit = _limit(cgroup)
    return allowed if limit is None else max(1, min(allowed, math.ceil(limit)))


def _limit(cgroup: Path) -> float | None:
    """Cores' worth of time that the container has; None without a limit, or where none can be read."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()  # cgroup v2
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        old = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return old / int((cgroup / "cpu/cpu.cfs_period_us").read_text()) if old > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
