"""A routing decision and the picture it was made from, as one JSON object: what POST /debug/route answers.

policy, outcome, reason         as in the `x-kvatlas-route` header
replica_id, predicted_tokens    the choice, and what it is expected to have cached of the prompt
prompt_tokens, output_tokens    of the request; the latter at most
candidates                      best first. Of one that no live pool speaks for, and in a fallback of all of them, only
                                queued_tokens and running_requests are known (what is booked there), the rest is null. Each has
    replica_id, pool            null for a replica that no live pool speaks for
    pool_seq                    number of the last change of the pool that the mirror has
    matched_tokens              of the prompt, listed by the directory
    promised_tokens             expected beyond these, because a prompt on its way there begins alike
    cached_tokens               both together: what the policy sees
    ...                         every term of the policy, the unit at the end of its name
    score                       lower is better; null, as all terms, where the candidate was not scored
not_in_directory                the candidates without a pool, which come last
directory                       state, lag_s, lag_entries, resyncs, gaps and problem of this router's picture
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.decision import RouteDecision

_FROM_HEARTBEATS = ("cached_tokens", "free_tokens", "prefill_tokens_per_s", "waiting_requests", "held_tokens")
_OF_THE_PICTURE = ("state", "lag_s", "lag_entries", "resyncs", "gaps", "problem")


def explanation(
    decision: RouteDecision, prompt_tokens: int, output_tokens: int, directory: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the object. `decision` is one of `RouteService.explain`, `directory` that part of `RouteService.report`."""
    told = decision.explain()
    is_blind = told["outcome"] == "fallback"
    homes = {name: pool for pool in directory["pools"] for name in pool["replica_ids"]}
    candidates = [
        _placed(candidate, homes.get(candidate["replica_id"]), is_known=not is_blind and candidate["score"] is not None)
        for candidate in told.pop("candidates")
    ]
    return {
        **told,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "candidates": candidates,
        "not_in_directory": sorted(one["replica_id"] for one in candidates if one["pool"] is None),
        "directory": {name: directory[name] for name in _OF_THE_PICTURE},
    }


def _placed(candidate: dict[str, Any], pool: Mapping[str, Any] | None, *, is_known: bool) -> dict[str, Any]:
    """The candidate with its pool, and what is known of the prompt before everything else.

    `is_known`: whether a heartbeat told of it. Its columns have zeros otherwise, which would say that it is empty and idle.
    """
    rest = dict(candidate)
    if not is_known:
        rest |= {name: None for name in _FROM_HEARTBEATS if name in rest}
    first = {"replica_id": rest.pop("replica_id"), "pool": None, "pool_seq": None}
    if pool is not None:
        first |= {"pool": pool["pool"], "pool_seq": pool["seq"]}
    prompt = {name: rest.pop(name, None) for name in ("matched_tokens", "promised_tokens", "cached_tokens")}
    return {**first, **prompt, **rest}
