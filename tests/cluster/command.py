"""How a command ended, and the check that every refusal gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


def assert_one_sentence(done: Done, code: int, *words: str) -> None:
    """The command said what is wrong in one line on stderr, in plain text, and left with `code`."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvatlas: ")
    for word in words:
        assert word in lines[0]
    assert "\x1b" not in done.stderr
