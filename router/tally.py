"""Totals of one router since it began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from router.decision import OUTCOMES, Outcome


@dataclass(slots=True)
class Tally:
    """Requests by outcome, and tokens: of the same requests, so that they may be compared. The owner holds a lock."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    queried_tokens: int = 0
    predicted_tokens: int = 0
    measured_tokens: int = 0
    phantom_tokens: int = 0
    retries: int = 0

    def look_up(self, queried_tokens: int, predicted_tokens: int, measured_tokens: int, phantom_tokens: int) -> None:
        """Adds one request."""
        self.queried_tokens += queried_tokens
        self.predicted_tokens += predicted_tokens
        self.measured_tokens += measured_tokens
        self.phantom_tokens += phantom_tokens

    def report(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "decisions": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "queried_tokens": self.queried_tokens,
            "predicted_tokens": self.predicted_tokens,
            "measured_tokens": self.measured_tokens,
            "phantom_tokens": self.phantom_tokens,
            "retries": self.retries,
        }
