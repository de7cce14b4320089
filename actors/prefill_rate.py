"""How many prompt tokens a second the engine computes, as measured, for whoever decides where the next prompt goes.

A decaying sum of tokens over a decaying sum of seconds, so that large chunks count for more than the ends of prompts. The seconds
are those of whole steps: what the decodes in the same step take is part of what a prompt has to wait for.
"""

from __future__ import annotations

_KEPT = 0.9
_LEAST_TOKENS = 2
"""A single token may be a decode."""


class PrefillRate:
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self.tokens_per_s = 0.0
        """0.0 until something was measured."""

    def note(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` prompt tokens and took `seconds`."""
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self.tokens_per_s = self._tokens / self._seconds
