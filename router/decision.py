"""A routing decision that explains itself: log line, metric, header and explanation are all made from this object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np

from router.view import FloatColumn, IntColumn, View

Outcome = Literal["prefix_hit", "no_prefix", "load_override", "fallback"]
"""What a decision came to. `prefix_hit`: no candidate holds more of the prompt than the one chosen. `load_override`: another one
does, but load (or a policy that does not look at prefixes) decided otherwise. `no_prefix`: none holds any of it.
`fallback`: decided by load alone, because there was no picture of the directory; the reason says why."""

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)

_UNITS: Final = {"running": "running_requests", "waiting": "waiting_requests"}


def outcome_of(cached_tokens: IntColumn, chosen: int) -> Outcome:
    """Returns the outcome of choosing the candidate with index `chosen`, given what each has cached."""
    most = np.maximum.reduce(cached_tokens)
    if not most:
        return "no_prefix"
    return "prefix_hit" if cached_tokens[chosen] == most else "load_override"


@dataclass(slots=True)
class RouteDecision:
    """Candidates by rank, and why.

    `order` lists indices into `view`, best first. `terms` are the columns the policy computed, in its own units;
    `reason` says in a few words what decided, in a fallback why it is one. Lower `score` is better, in `score_unit`; NaN, in
    `score` and `terms`, where a candidate was put last without being scored.
    """

    policy: str
    outcome: Outcome
    reason: str
    view: View
    order: tuple[int, ...]
    score: FloatColumn
    terms: Mapping[str, FloatColumn]
    score_unit: str = ""

    @property
    def replica_id(self) -> str:
        """The replica chosen; empty where there was none to choose from."""
        return self.view.replica_ids[self.order[0]] if self.order else ""

    @property
    def predicted_tokens(self) -> int:
        """Prompt tokens that the replica chosen is expected to have cached."""
        return int(self.view.cached_tokens[self.order[0]]) if self.order else 0

    @property
    def ranking(self) -> list[str]:
        """The replicas, best first."""
        return [self.view.replica_ids[index] for index in self.order]

    def accepted_by(self, replica_id: str) -> RouteDecision:
        """Returns the decision as it turned out: candidate `replica_id` took the request. Raises ValueError for another."""
        if replica_id == self.replica_id:
            return self
        chosen = list(self.view.replica_ids).index(replica_id)
        order = (chosen, *(index for index in self.order if index != chosen))
        if self.outcome == "fallback":
            return replace(self, order=order)
        outcome = outcome_of(self.view.cached_tokens, chosen)
        return replace(self, order=order, outcome=outcome, reason="the first choice did not take it")

    def header(self) -> str:
        """Value of the `x-kvatlas-route` header: printable ASCII, the reason last."""
        text = (
            f"policy={self.policy}; outcome={self.outcome}; "
            f"predicted_tokens={self.predicted_tokens}; reason={self.reason.replace(';', ',')}"
        )
        return "".join(character if " " <= character <= "~" else "?" for character in text)

    def explain(self) -> dict[str, Any]:
        """Everything, ready for JSON: one record per candidate, best first; null for what was not scored or is not known.

        A record has what was seen of the candidate, every term and the score; units are in the names, that of the score is
        `score_unit`.
        """
        columns = {_UNITS.get(name, name): column for name, column in self.view.columns().items()}
        columns |= {**self.terms, "score": self.score}
        candidates = [
            {
                "replica_id": self.view.replica_ids[index],
                **{name: _finite(column[index].item()) for name, column in columns.items()},
            }
            for index in self.order
        ]
        return {
            "policy": self.policy,
            "outcome": self.outcome,
            "reason": self.reason,
            "replica_id": self.replica_id,
            "predicted_tokens": self.predicted_tokens,
            "reuse_share": _finite(self.view.reuse_share),
            "score_unit": self.score_unit,
            "candidates": candidates,
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
