"""Totals of one router since it began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from router.decision import OUTCOMES, Outcome


class Found(NamedTuple):
    """What was predicted of one prompt and what its replica found.

    `listed_tokens` of the `predicted_tokens` are in blocks that the directory lists; the rest is promised by prompts in flight.
    """

    queried_tokens: int
    predicted_tokens: int
    listed_tokens: int
    measured_tokens: int

    @property
    def phantom_tokens(self) -> int:
        """Listed and not found."""
        return max(0, self.listed_tokens - self.measured_tokens)

    @property
    def promised_tokens(self) -> int:
        """Predicted beyond what is listed."""
        return self.predicted_tokens - self.listed_tokens

    @property
    def unkept_tokens(self) -> int:
        """Promised and not found."""
        return max(0, self.predicted_tokens - max(self.listed_tokens, self.measured_tokens))


@dataclass(slots=True)
class Tally:
    """Requests by outcome, and tokens: of the same requests, so that they may be compared. The owner holds a lock."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    queried_tokens: int = 0
    predicted_tokens: int = 0
    promised_tokens: int = 0
    measured_tokens: int = 0
    phantom_tokens: int = 0
    unkept_tokens: int = 0
    retries: int = 0

    def look_up(self, found: Found) -> None:
        """Adds one request."""
        self.queried_tokens += found.queried_tokens
        self.predicted_tokens += found.predicted_tokens
        self.promised_tokens += found.promised_tokens
        self.measured_tokens += found.measured_tokens
        self.phantom_tokens += found.phantom_tokens
        self.unkept_tokens += found.unkept_tokens

    def report(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "decisions": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "queried_tokens": self.queried_tokens,
            "predicted_tokens": self.predicted_tokens,
            "promised_tokens": self.promised_tokens,
            "measured_tokens": self.measured_tokens,
            "phantom_tokens": self.phantom_tokens,
            "unkept_tokens": self.unkept_tokens,
            "retries": self.retries,
        }
