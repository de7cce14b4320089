"""How much others took: from what the kernel counts, less what is our own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.bench.engine_others import Moment, now, undisturbed

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class One:
    others: float


def stat(path: Path, *seconds: float) -> Path:
    path.write_text(f"cpu  {' '.join(str(int(value * TICKS)) for value in seconds)}\ncpu0 1 2 3\n", encoding="ascii")
    return path


def test_busy_is_all_but_waiting(tmp_path: Path) -> None:
    """user, nice, system, idle, disk, irq, softirq, stolen, and what guests had, which is in user already."""
    found = now(stat(tmp_path / "stat", 10, 1, 2, 50, 5, 0.5, 0.5, 3, 4, 4), lambda: 7.0)
    assert (found.busy_s, found.all_s, found.own_s) == (17.0, 72.0, 7.0)


@pytest.mark.parametrize(
    ("after", "share"),
    [
        (Moment(14.0, 20.0, 4.0), 0.0),  # all that is busy is our own
        (Moment(14.0, 20.0, 2.0), 0.2),
        (Moment(20.0, 20.0, 0.0), 1.0),
        (Moment(10.0, 20.0, 0.5), 0.0),  # ticks are counted late
        (Moment(10.0, 10.0, 0.0), 0.0),
    ],
)
def test_the_share_of_others(after: Moment, share: float) -> None:
    assert after.others_since(Moment(10.0, 10.0, 0.0)) == pytest.approx(share)


def test_children_are_our_own() -> None:
    before = now()
    command = [
        sys.executable,
        "-c",
        "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\ninput()",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = now()
        child.communicate(b"\n")
    assert after.own_s - before.own_s >= 0.35
    assert 0.0 <= after.others_since(before) <= 1.0


def test_the_quiet_ones_count_or_all() -> None:
    quiet, loud = One(0.05), One(0.5)
    assert undisturbed([loud, quiet, loud]) == [quiet]
    assert undisturbed([loud, loud]) == [loud, loud]
