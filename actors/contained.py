"""A constraint whose errors end its own request, not the step thread.

The step thread serves everybody. Whatever a constraint raises is logged, becomes the failure of its sequence, and
nothing more is asked of it; it is closed in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from actors.constraint import Constraint
from actors.errors import ReplicaFailed, RequestRefused

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class Contained:
    """Around the constraint of one sequence. No method raises."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._broken: ReplicaFailed | None = None
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether the next token can be chosen, or it is known that none will be."""
        return self._ask(lambda: self._constraint.ready, True)

    @property
    def done(self) -> bool:
        """Whether nothing may follow any more."""
        return self._ask(lambda: self._constraint.done, False)

    @property
    def failure(self) -> ReplicaFailed | RequestRefused | None:
        """Why the sequence has to end. The client's grammar, unless the constraint itself broke."""
        reason = self._ask(lambda: self._constraint.failure, "")
        return self._broken or (RequestRefused(reason) if reason else None)

    def apply(self, logits: torch.Tensor) -> None:
        """Rule out in one row [vocab] what may not come next; nothing where nothing will come, as the caller finds then.

        A constraint that has ended has no mask, so it is not asked for one.
        """
        if self.failure is None and not self.done:
            self._ask(lambda: self._constraint.apply(logits), None)

    def accept(self, token: int) -> None:
        """The token has come."""
        self._ask(lambda: self._constraint.accept(token), None)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._constraint.close()
        except Exception:
            _log.exception("a constraint could not be closed")

    def _ask(self, question: Callable[[], _Value], otherwise: _Value) -> _Value:
        if self._broken is not None:
            return otherwise
        try:
            return question()
        except Exception as error:
            _log.exception("a constraint failed; its request ends")
            self._broken = ReplicaFailed(f"the constraint of the answer failed: {type(error).__name__}: {error}")
            return otherwise
