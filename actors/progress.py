"""What a start spends its time on: named phases with seconds and bytes, told to a person while they run.

On a terminal a phase is a live bar that turns into its line; elsewhere each phase prints exactly one line, when it
ends. `Progress` is what code that does the work needs; `SilentProgress` measures only, `TerminalProgress` also prints.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO


@dataclass(slots=True)
class Phase:
    """One running phase. The worker may set `total_bytes` once known and raise `done_bytes` as it goes, from any thread."""

    name: str
    detail: str = ""
    total_bytes: int = 0
    done_bytes: int = 0


class Progress(Protocol):
    """Where a loader reports to."""

    def phase(self, name: str, detail: str = "") -> AbstractContextManager[Phase]:
        """Time the `with` body as phase `name`; a name used twice adds up. An exception ends the phase and passes."""
        ...

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase ended so far, in order of first use."""
        ...

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes per phase ended so far, of those that counted any."""
        ...


@dataclass(slots=True)
class SilentProgress:
    """Measures, prints nothing. `clock` returns seconds."""

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        """See `Progress.phase`."""
        start = self.clock()
        phase = Phase(name, detail)
        try:
            yield phase
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start
            if phase.done_bytes:
                self.bytes[name] = self.bytes.get(name, 0) + phase.done_bytes


class TerminalProgress:
    """Prints each phase to `stream`: a bar while it runs when that is a terminal, one line when it ended in any case."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._silent = SilentProgress(clock)
        self._clock = clock

    @property
    def seconds(self) -> dict[str, float]:
        """See `Progress.seconds`."""
        return self._silent.seconds

    @property
    def bytes(self) -> dict[str, int]:
        """See `Progress.bytes`."""
        return self._silent.bytes

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        """See `Progress.phase`. The line names the outcome: `load  269 MB  1.2 s`, or `failed`."""
        start = self._clock()
        outcome = "failed"
        with self._silent.phase(name, detail) as phase:
            bar = _live_bar(phase, self._stream) if self._stream.isatty() else None
            try:
                yield phase
                outcome = ""
            finally:
                if bar is not None:
                    bar()
                print(_line(phase, self._clock() - start, outcome), file=self._stream, flush=True)


def format_bytes(count: int) -> str:
    """`count` bytes for a person, in powers of 1000: `538 MB`, `1.4 GB`."""
    if count < 1_000_000:
        return f"{count / 1000:.0f} kB"
    if count < 1_000_000_000:
        return f"{count / 1_000_000:.0f} MB"
    return f"{count / 1_000_000_000:.1f} GB"


def _line(phase: Phase, seconds: float, outcome: str) -> str:
    size = format_bytes(phase.done_bytes) if phase.done_bytes else ""
    parts = [f"  {phase.name:<9}", f"{size:>8}", f"{seconds:>6.1f} s", phase.detail, outcome]
    return " ".join(part for part in parts if part).rstrip()


def _live_bar(phase: Phase, stream: TextIO) -> Callable[[], None]:
    """Start drawing `phase` on the terminal; the returned function stops it and removes the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()]
    bar = Bar(*columns, console=Console(file=stream), transient=True)
    task = bar.add_task(f"{phase.name} {phase.detail}".strip(), total=phase.total_bytes or None)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.1):
            bar.update(task, completed=phase.done_bytes, total=phase.total_bytes or None)

    bar.start()
    follower = threading.Thread(target=follow, name="kvatlas-progress", daemon=True)
    follower.start()

    def stop() -> None:
        ended.set()
        follower.join()
        bar.stop()

    return stop
