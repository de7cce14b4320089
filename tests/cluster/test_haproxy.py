"""The launcher of HAProxy."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from cluster.haproxy import bundled_binary, write_launcher


def test_the_launcher_runs_the_bundled_binary(tmp_path: Path) -> None:
    binary = bundled_binary()
    assert binary is not None
    launcher = write_launcher(binary, tmp_path / "bin")
    assert launcher == write_launcher(binary, tmp_path / "bin")
    done = subprocess.run([launcher, "-v"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("HAProxy version")
    assert [file.name for file in launcher.parent.iterdir()] == [launcher.name]


def test_arguments_pass_and_splicing_is_off(tmp_path: Path) -> None:
    fake = tmp_path / "a binary"
    fake.write_text('#!/bin/sh\nfor argument in "$@"; do echo "[$argument]"; done\n')
    fake.chmod(0o755)
    done = subprocess.run([write_launcher(fake, tmp_path), "-f", "x y"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["[-dS]", "[-f]", "[x y]"]


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    fake.chmod(0o755)
    script = "import subprocess, sys, time\nsubprocess.Popen([sys.argv[1]])\ntime.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, write_launcher(fake, tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    with parent.stdout:
        parent.stdout.read()  # until the child, which shares it, has let go of it: a moment before it is gone
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
