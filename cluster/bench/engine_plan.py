"""What the engine benchmark measures, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from actors.config import Mode

SKIPPED: Final = 1
"""Tokens of every stream before those that are measured: the first one ends the prompt's computation."""


@dataclass(frozen=True, slots=True)
class Point:
    """One entry of the grid: `batch` sequences in all, shared evenly by `engines`, with `ctx` tokens of context on average."""

    ctx: int
    batch: int
    engines: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """`contexts` and `batches` span the grid, `rounds` times; empty: none. `steps`: decode steps of one measurement.

    `threads` are those of the one engine; two engines share them. `prompt_tokens` is the prompt whose time to first token is
    measured.
    """

    model: str = "demo"
    mode: Mode = "fast"
    contexts: tuple[int, ...] = (64, 512, 1500)
    batches: tuple[int, ...] = (1, 8, 16)
    rounds: int = 5
    steps: int = 24
    prompt_tokens: int = 1000
    threads: int = 2
    http: bool = False
    calibrate: bool = False
    deterministic: bool = False

    @property
    def points(self) -> list[Point]:
        """The grid: each batch with one engine, and the largest one with two where it can be halved."""
        shared = [batch for batch in self.batches[-1:] if batch % 2 == 0]
        return [
            *(Point(ctx, batch) for ctx in self.contexts for batch in self.batches),
            *(Point(ctx, batch, 2) for ctx in self.contexts for batch in shared),
        ]

    @property
    def longest_tokens(self) -> int:
        """The longest prompt of the grid that is computed beforehand; 0 without a grid."""
        return max((prompt_tokens(ctx, self.steps) for ctx in self.contexts), default=0)

    def pool_tokens(self, engines: int) -> int:
        """Room for one of `engines`: all prompts of the grid with what is generated, and those of the other measurements."""
        sequences = -(-max(self.batches, default=0) // engines)
        return sequences * (self.longest_tokens + 2 * self.steps + 64) + 4 * self.prompt_tokens + 4096


def prompt_tokens(ctx: int, steps: int) -> int:
    """How long a prompt is whose mean context over `steps` steps is `ctx`; at least 1."""
    return max(1, ctx - SKIPPED - steps // 2)
