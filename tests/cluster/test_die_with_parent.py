"""The wrapper through which children start. That they die is tested where it is used."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from cluster.die_with_parent import bound


def test_a_parent_that_is_gone_already_is_noticed(tmp_path: Path) -> None:
    """The kernel tells of a death after the request only."""
    made = tmp_path / "made"
    command = ["/bin/sh", "-c", 'touch "$0"', str(made)]
    subprocess.run(bound(command, signal.SIGKILL, 1 if os.getpid() != 1 else 2), check=True)
    assert not made.exists()
    subprocess.run(bound(command, signal.SIGKILL, os.getpid()), check=True)
    assert made.exists()


def test_without_a_parent_named_any_will_do(tmp_path: Path) -> None:
    made = tmp_path / "made"
    subprocess.run(bound(["/bin/sh", "-c", 'touch "$0"', str(made)], signal.SIGTERM), check=True)
    assert made.exists()
