"""A routing decision that explains itself: log line, metric, header and explanation are all made from this object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.view import FloatColumn, View


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Candidates by rank, and why.

    `order` lists indices into `view`, best first. `terms` are the columns the policy computed, in its own units;
    `reason` says in a few words what decided. Lower `score` is better.
    """

    policy: str
    reason: str
    view: View
    order: tuple[int, ...]
    score: FloatColumn
    terms: Mapping[str, FloatColumn]

    @property
    def replica_id(self) -> str:
        """The replica chosen."""
        return self.view.replica_ids[self.order[0]]

    @property
    def predicted_tokens(self) -> int:
        """Prompt tokens that the replica chosen is expected to have cached."""
        return int(self.view.cached_tokens[self.order[0]])

    def header(self) -> str:
        """Value of the `x-kvatlas-route` header."""
        return f"policy={self.policy}; predicted={self.predicted_tokens}; reason={self.reason}"

    def explain(self) -> dict[str, Any]:
        """Everything, ready for JSON: one record per candidate, best first."""
        columns = {
            "cached_tokens": self.view.cached_tokens,
            "queued_tokens": self.view.queued_tokens,
            "running": self.view.running,
            **self.terms,
            "score": self.score,
        }
        candidates = [
            {
                "replica_id": self.view.replica_ids[index],
                **{name: column[index].item() for name, column in columns.items()},
            }
            for index in self.order
        ]
        return {
            "policy": self.policy,
            "reason": self.reason,
            "replica_id": self.replica_id,
            "predicted_tokens": self.predicted_tokens,
            "candidates": candidates,
        }
