"""How commands speak: sentences to stderr, results to stdout, JSON as the last line, colour only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def say(text: str) -> None:
    """A line for the person, at once even into a pipe."""
    print(text, flush=True)


def complain(text: str) -> None:
    """One sentence on stderr."""
    if sys.stderr.isatty():
        text = f"\x1b[31m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


def print_json(value: dict[str, Any]) -> None:
    """`value` as one line, the last of stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their content, two spaces apart."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
