"""`kvatlas directory check` against the server of the session."""

from __future__ import annotations

import subprocess
import sys

from tests.raycluster.conftest import ADMIN_KEY, Served
from tests.raycluster.server_process import ROOT


def check_is_clean(served: Served) -> str:
    """Asserts that it finds no missing and no phantom key; what it printed."""
    command = [sys.executable, "-m", "cluster.cli.main", "directory", "check", "--url", served.url, "--within", "10"]
    environment = {"KVATLAS_HTTP__ADMIN_KEY": ADMIN_KEY, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
