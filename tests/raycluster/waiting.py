"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(check: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether `check` becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.05)
    return False
