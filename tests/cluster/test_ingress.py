"""The ingress's tokenizer comes without torch; its end is the router's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress import Ingress
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint

SCRIPT = """
import sys
from pathlib import Path
from cluster.ingress import _codec
codec = _codec(Path(sys.argv[1]))
assert codec.render_chat([{"role": "user", "content": "hi"}])
print(codec.vocab_size, "torch" in sys.modules)
import torch
"""


@pytest.mark.slow
def test_tokenizes_without_torch_and_leaves_torch_importable(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["262", "False"]


@pytest.mark.parametrize("built", [True, False])
def test_serve_ends_the_router_with_the_ingress(built: bool) -> None:
    class Routing:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    routing = Routing()
    plain: Any = Ingress.__mro__[1]  # without what Ray puts around it
    ingress = object.__new__(plain)
    if built:
        ingress._routing = routing
    ingress.__del__()
    assert routing.closed == built
