"""How the memory of all processes below one grows with time.

Growth is the slope of the line through the samples (least squares), so that one large answer at the end of a run, or a garbage
collection at its beginning, does not decide. Resident memory counts the pages of a region that a process has touched.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

Sample = tuple[float, int]
"""Seconds, and bytes."""

PAGE_BYTES = 4096


class MemoryLog:
    """Resident memory of the processes below `root_pid`, every `period_s`, while `running`."""

    def __init__(self, root_pid: int, period_s: float = 2.0) -> None:
        self._root = root_pid
        self._period_s = period_s
        self._stop = threading.Event()
        self.samples: defaultdict[tuple[int, str], list[Sample]] = defaultdict(list)
        """By process id and name; seconds since the begin."""

    @contextmanager
    def running(self) -> Iterator[MemoryLog]:
        """Takes samples in a thread of its own while the body runs."""
        begun = time.monotonic()

        def run() -> None:
            while not self._stop.wait(self._period_s):
                now = time.monotonic() - begun
                for pid, found in resident_bytes(self._root).items():
                    self.samples[pid, name_of(pid)].append((now, found))

        thread = threading.Thread(target=run, name="memory-log")
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def growth_per_min(self, after_s: float) -> dict[str, float]:
        """Bytes a minute of each process that lived from `after_s` to the end, by name and process id."""
        last = max((samples[-1][0] for samples in self.samples.values()), default=0.0)
        found = {}
        for (pid, name), samples in self.samples.items():
            late = [sample for sample in samples if sample[0] >= after_s]
            if (
                samples[0][0] <= after_s + self._period_s
                and samples[-1][0] >= last - 2 * self._period_s
                and len(late) > 2
            ):
                found[f"{name} {pid}"] = 60 * slope(late)
        return found


def slope(samples: Sequence[Sample]) -> float:
    """Bytes a second of the straight line nearest to `samples`, of which there are two or more at different times."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread


def resident_bytes(root_pid: int) -> dict[int, int]:
    """Of `root_pid` and all processes below it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            fields = _read(folder / "stat").rpartition(")")[2].split()
            if fields:
                parents[int(folder.name)] = int(fields[1])
    return {pid: size for pid in parents if _descends(pid, root_pid, parents) and (size := _resident(pid))}


def name_of(pid: int) -> str:
    """What the process calls itself: of Ray's, the actor; of others, the program."""
    title = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
    first = title.partition(" ")[0]
    return first if first.startswith("ray::") else first.rpartition("/")[2] or "?"


def _resident(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * PAGE_BYTES if fields else 0


def _descends(pid: int, root_pid: int, parents: dict[int, int]) -> bool:
    for _ in range(len(parents)):
        if pid == root_pid:
            return True
        if pid not in parents:
            return False
        pid = parents[pid]
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has just ended
        return ""
