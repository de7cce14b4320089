"""The launcher of HAProxy."""

from __future__ import annotations

import subprocess
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
