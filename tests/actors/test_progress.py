"""Phases: seconds add up, one line each, and a failure passes through."""

from __future__ import annotations

import contextlib
import io
import os
import pty
from collections.abc import Callable, Iterator

import pytest

from actors.progress import Progress, SilentProgress, TerminalProgress, format_bytes


def clock(*times: float) -> Callable[[], float]:
    left: Iterator[float] = iter(times)
    return lambda: next(left)


def test_seconds_per_phase_in_order_and_added_up() -> None:
    progress: Progress = SilentProgress(clock(0.0, 1.0, 10.0, 12.0, 20.0, 23.0))
    for name in ("load", "allocate", "load"):
        with progress.phase(name):
            pass
    assert list(progress.seconds.items()) == [("load", 4.0), ("allocate", 2.0)]


def test_one_line_per_phase_when_not_a_terminal() -> None:
    out = io.StringIO()
    progress = TerminalProgress(out, clock(0.0, 0.0, 1.5, 1.5))
    with progress.phase("download", "a wheel") as phase:
        phase.total_bytes = 100_000_000
        phase.done_bytes = 93_000_000
        assert out.getvalue() == ""
    assert out.getvalue().splitlines() == ["  download     93 MB    1.5 s a wheel"]
    assert progress.seconds == {"download": 1.5}


def test_a_failure_passes_and_is_said() -> None:
    out = io.StringIO()
    progress = TerminalProgress(out)
    with pytest.raises(ValueError, match="odd"), progress.phase("convert"):
        raise ValueError("odd")
    assert out.getvalue().rstrip().endswith("failed")
    assert "convert" in progress.seconds


def test_on_a_terminal_the_bar_goes_and_the_line_stays() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        progress = TerminalProgress(terminal)
        with progress.phase("load", "weights") as phase:
            phase.done_bytes = 5_000_000
    written = b""
    with os.fdopen(master, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # EIO: nobody writes any more
        while more := reader.read(1 << 16):  # a pseudo terminal gives what it has, which may be a part
            written += more
    shown = written.decode()
    assert "load" in shown
    assert shown.rstrip().splitlines()[-1].split()[-1] == "weights"


@pytest.mark.parametrize(("count", "text"), [(1500, "2 kB"), (538_090_408, "538 MB"), (1_400_000_000, "1.4 GB")])
def test_bytes_for_a_person(count: int, text: str) -> None:
    assert format_bytes(count) == text
