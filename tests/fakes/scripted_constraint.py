"""A constraint that allows what it is told to, and is ready when it is told to be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch


class ScriptedConstraint:
    """`allowed[i]` may come as token i; after all of them the answer is complete. Set `ready`, `failure` from outside.

    With `pauses`, it is ready for a token only once that is said anew after the token before it.
    """

    def __init__(self, allowed: Sequence[Collection[int]], *, ready: bool = True, pauses: bool = False) -> None:
        self._allowed = allowed
        self._pauses = pauses
        self.ready = ready
        self.failure = ""
        self.done = False
        self.accepted: list[int] = []
        self.closed = 0
        self.masks = 0
        self.on_accept: Callable[[int], None] = lambda token: None

    def apply(self, logits: torch.Tensor) -> None:
        assert self.ready
        assert not self.closed
        assert not self.failure
        self.masks += 1
        kept = torch.full_like(logits, float("-inf"))
        ids = list(self._allowed[len(self.accepted)])
        kept[ids] = logits[ids]
        logits.copy_(kept)

    def accept(self, token: int) -> None:
        assert not self.closed
        assert not self.done
        self.accepted.append(token)
        self.ready = not self._pauses
        self.done = len(self.accepted) == len(self._allowed)
        self.on_accept(token)

    def close(self) -> None:
        self.closed += 1
