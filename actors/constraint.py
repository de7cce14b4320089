"""What an answer must look like, as the step thread sees it: which tokens may come next.

Masks take from microseconds to many milliseconds. So whoever implements this computes them elsewhere, and a sequence whose mask
is not there yet sits out the step: a hard grammar costs nobody else anything.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Constraint(Protocol):
    """Of one sequence, from its first token to its last. Only the step thread calls it; no method waits."""

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is there, or it is known that there will be none."""
        ...

    @property
    def failure(self) -> str:
        """Why it cannot go on, in a sentence for the client; empty while it can."""
        ...

    @property
    def done(self) -> bool:
        """Whether the answer is complete and nothing may follow: the sequence ends with reason "stop"."""
        ...

    def apply(self, logits: torch.Tensor) -> None:
        """Sets to minus infinity what may not come next, in one row [vocab] of logits. Only when `ready`."""
        ...

    def accept(self, token: int) -> None:
        """The token has come; from now on `ready` and all else are about the one after it."""
        ...

    def close(self) -> None:
        """The sequence has ended, in whatever way. Idempotent."""
        ...
