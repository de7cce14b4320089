"""What another policy would have decided, given what was known each time: a decision log run through `decide`.

Every decision of the log is made again on the very columns that the policy saw then. The two choices are compared in
tokens expected to be cached, and in seconds by the terms of `cost`, which is the yardstick for all policies: the expected
time to the first token (queue_s + prefill_s + decode_s), and the whole score (with what the request costs those after
it).

Limits: each decision is taken for itself. Had it been another, later queues and caches would have been others as well;
`kvatlas replay` on a trace simulates that. The options of the policies are those given here, not those of the day of the
log. Sessions are hashed in the log, so among equals another replica may be a session's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from router.decision import RouteDecision
from router.decision_record import Decided, Measured, Record
from router.policy import decide
from router.route_config import RouteConfig
from router.view import RouteRequest


@dataclass(slots=True)
class Choices:
    """Totals over one choice for each decision. Seconds are sums; `told` gives means."""

    predicted_tokens: int = 0
    ttft_s: float = 0.0
    cost_s: float = 0.0

    def add(self, yardstick: RouteDecision, chosen: int) -> None:
        """Counts that candidate `chosen` was taken. `yardstick`: a decision of `cost` about the same candidates."""
        terms = yardstick.terms
        self.predicted_tokens += int(yardstick.view.cached_tokens[chosen])
        self.ttft_s += float(terms["queue_s"][chosen] + terms["prefill_s"][chosen] + terms["decode_s"][chosen])
        self.cost_s += float(yardstick.score[chosen])

    def told(self, decisions: int) -> dict[str, Any]:
        """Returns tokens and mean seconds, ready for JSON; null for means of nothing."""
        means = {"ttft_mean_s": self.ttft_s, "cost_mean_s": self.cost_s}
        shares = {name: total / decisions if decisions else None for name, total in means.items()}
        return {"predicted_tokens": self.predicted_tokens, **shares}


@dataclass(slots=True)
class Counterfactual:
    """The outcome. Of `decisions`, `changed` go to another replica, `equal` of these to one that the policy thinks no better.

    Not among `decisions`: `fallbacks`, which were decided without a picture of the directory, and those whose choice was
    none of the candidates scored (`unscored`).
    """

    policy: str
    decisions: int = 0
    changed: int = 0
    equal: int = 0
    fallbacks: int = 0
    unscored: int = 0
    prompt_tokens: int = 0
    recorded: Choices = field(default_factory=Choices)
    replayed: Choices = field(default_factory=Choices)

    def told(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        return {
            "policy": self.policy,
            "decisions": self.decisions,
            "changed": self.changed,
            "equal": self.equal,
            "fallbacks": self.fallbacks,
            "unscored": self.unscored,
            "prompt_tokens": self.prompt_tokens,
            "recorded": self.recorded.told(self.decisions),
            "replayed": self.replayed.told(self.decisions),
        }


@dataclass(slots=True)
class Reality:
    """What was measured of the decisions in a log: of `requests`, tokens that were found cached and that were predicted.

    `ttft_s` is a sum over the `timed` ones among them, those that had a first token.
    """

    requests: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    timed: int = 0
    ttft_s: float = 0.0

    def add(self, decided: Decided, measured: Measured) -> None:
        """Counts one request by the decision that stood."""
        self.requests += 1
        self.predicted_tokens += decided.predicted_tokens
        self.cached_tokens += measured.cached_tokens
        if measured.ttft_s is not None:
            self.timed += 1
            self.ttft_s += measured.ttft_s

    def told(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        return {
            "requests": self.requests,
            "predicted_tokens": self.predicted_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_mean_s": self.ttft_s / self.timed if self.timed else None,
        }


def rerun(
    records: Iterable[Record], configs: Mapping[str, RouteConfig], seed: int
) -> tuple[list[Counterfactual], Reality]:
    """Returns what each of `configs` (by the name it is told under) would have decided, and what was measured.

    Reads `records` once, in order. Chance comes from `seed`, for each policy the same.
    """
    runs = [(Counterfactual(name), config, random.Random(seed)) for name, config in configs.items()]
    reality = Reality()
    standing: dict[str, Decided] = {}
    turn = 0
    for record in records:
        if isinstance(record, Measured):
            decided = standing.pop(record.request_id, None)
            # Where another replica took it in the end, what was predicted of the first choice is no prediction.
            if decided is not None and decided.replica_id == record.replica_id:
                reality.add(decided, record)
            continue
        standing[record.request_id] = record
        for found, config, rng in runs:
            _again(found, record, config, rng, turn)
        turn += 1
    return [found for found, _, _ in runs], reality


def _again(found: Counterfactual, record: Decided, config: RouteConfig, rng: random.Random, turn: int) -> None:
    """Decides `record` once more and adds the two choices to `found`."""
    if record.outcome == "fallback":
        found.fallbacks += 1
        return
    names = list(record.view.replica_ids)
    if record.replica_id not in names:
        found.unscored += 1
        return
    request = RouteRequest(
        record.prompt_tokens, record.output_tokens, turn, record.session, bytes.fromhex(record.prefix)
    )
    decision = decide(request, record.view, config, rng)
    yardstick = decision
    if config.policy != "cost":
        yardstick = decide(request, record.view, replace(config, policy="cost"), random.Random(0))
    before, now = names.index(record.replica_id), decision.order[0]
    found.decisions += 1
    found.prompt_tokens += record.prompt_tokens
    found.recorded.add(yardstick, before)
    found.replayed.add(yardstick, now)
    if before != now:
        found.changed += 1
        tie = config.tie_s if config.policy == "cost" else 0.0
        found.equal += bool(decision.score[before] <= decision.score.min() + tie)
