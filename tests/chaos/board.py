"""A file of numbers through which the test and its workers speak without ever waiting for each other's code.

One row of 64-bit words a worker. The test writes COMMAND, the worker everything else. `COUNT` rises with every operation,
so the test sees at any time who gets on and who stands still.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

ROWS: Final = 2048
COMMAND, STATE, COUNT, SLOT, ROLES, PASSES = range(6)
_ROW_WORDS: Final = 8

RUN, QUIET, AUDIT, STOP = range(1, 5)
"""Commands, and the states that answer them."""
FAILED: Final = -1
"""State of a worker that found something wrong; its journal says what."""
LEADS_PUBLISHER, LEADS_TIDY = 1, 2
"""Bits of ROLES."""


class Board:
    """The rows of one arena; made by the test, opened by the workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(fd, 8 * ROWS * _ROW_WORDS)
            self._memory = mmap.mmap(fd, 8 * ROWS * _ROW_WORDS)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("q")

    def get(self, row: int, word: int) -> int:
        """The word of a row."""
        value: int = self._words[row * _ROW_WORDS + word]
        return value

    def put(self, row: int, word: int, value: int) -> None:
        """Writes the word of a row."""
        self._words[row * _ROW_WORDS + word] = value

    def close(self) -> None:
        """Unmaps it."""
        self._words.release()
        self._memory.close()
