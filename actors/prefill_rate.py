"""How many prompt tokens a second the engine computes, as measured, for whoever decides where the next prompt goes.

Tokens over seconds, both fading with time, so that large chunks count for more than the ends of prompts and recent ones for
more than old ones. The seconds are those of whole steps: what the decodes in the same step take is part of what a prompt
has to wait for.

Too little evidence is none: a replica that was once slow, for whatever reason, and got no prompts since, must not be
remembered as slow for ever.
"""

from __future__ import annotations

_HALF_LIFE_S = 10.0
_ENOUGH_TOKENS = 1024.0
_LEAST_TOKENS = 2
"""A single token may be a decode."""


class PrefillRate:
    """Written by one thread, read by any. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._seen = (0.0, 0.0, 0.0)  # tokens, seconds, when; replaced whole, so that a reader sees one moment

    def note(self, tokens: int, seconds: float, now: float) -> None:
        """A step that ended `now` computed `tokens` prompt tokens and took `seconds`."""
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        seen_tokens, seen_seconds, at = self._seen
        kept = _faded(now - at)
        self._seen = (kept * seen_tokens + tokens, kept * seen_seconds + seconds, now)

    def tokens_per_s(self, now: float) -> float:
        """0.0 while there is too little recent evidence."""
        tokens, seconds, at = self._seen
        return tokens / seconds if tokens * _faded(now - at) >= _ENOUGH_TOKENS else 0.0


def _faded(age_s: float) -> float:
    return float(0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))
