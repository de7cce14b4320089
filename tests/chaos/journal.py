"""What one worker writes down: a file of JSON lines, each written whole, so a death loses at most what came after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """Appends records to a file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, **record: Any) -> None:
        """Appends one record."""
        os.write(self._fd, json.dumps(record).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a journal; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines()]
