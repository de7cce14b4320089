"""Outcomes of a run as the numbers that are reported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.bench.replay import Outcome


def summarise(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The report: rates over all of `seconds`, percentiles and token counts over the requests that succeeded.

    `hit` is cached over prompt tokens as the server's usage states them. Percentiles are None when nothing succeeded.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    first = sorted(outcome.ttft_s for outcome in good)
    total = sorted(outcome.total_s for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    cached_tokens = sum(outcome.cached_tokens for outcome in good)
    out_tokens = sum(outcome.completion_tokens for outcome in good)
    kinds = Counter(outcome.error for outcome in outcomes if outcome.error)
    return {
        "requests": len(outcomes),
        "errors": len(outcomes) - len(good),
        "seconds": round(seconds, 3),
        "rps": round(len(good) / seconds, 3) if seconds else 0.0,
        "ttft_p50_s": percentile(first, 0.50),
        "ttft_p95_s": percentile(first, 0.95),
        "total_p50_s": percentile(total, 0.50),
        "total_p95_s": percentile(total, 0.95),
        "out_tok_s": round(out_tokens / seconds, 2) if seconds else 0.0,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": out_tokens,
        "hit": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
        "first_errors": [f"{count} x {text}" for text, count in kinds.most_common(3)],
    }


def by_replica(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Requests that succeeded and their prompt tokens, for every replica that the answers name, ordered by its id."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        if outcome.error or not outcome.replica:
            continue
        entry = found.setdefault(
            outcome.replica, {"replica_id": outcome.replica, "requests": 0, "cached_tokens": 0, "prompt_tokens": 0}
        )
        entry["requests"] += 1
        entry["cached_tokens"] += outcome.cached_tokens
        entry["prompt_tokens"] += outcome.prompt_tokens
    return [found[replica] for replica in sorted(found)]


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the ascending values do not exceed; None of nothing."""
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 4)
