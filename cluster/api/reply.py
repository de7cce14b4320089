"""What a generation sends back, apart from the choices, which chat and completions shape differently."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from actors.request import Admitted, Delta, FinishReason
from cluster.api.health import installed_version

ROUTE_CHARS = 1024
"""Longest x-kvatlas-route: proxies have room for a few kilobytes of headers, and a request may have hundreds of choices."""


@dataclass(slots=True)
class Outcome:
    """What one choice has come to so far. Mutated by `add`."""

    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Count `delta`."""
        self.completion_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class Choice(Protocol):
    """One answer on its way to the client, either as chunks (`opening`, then `chunks` of each delta) or `whole` after all
    deltas have been added. Both ways say the same.
    """

    @property
    def outcome(self) -> Outcome:
        """What has come so far."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """The first chunk, before anything has come; None if there is none."""
        ...

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Takes `delta` in. Elements of `choices`, each for a chunk of its own; a finish reason comes in the last, alone."""
        ...

    def add(self, delta: Delta) -> None:
        """Takes `delta` in, for `whole`."""
        ...

    def whole(self) -> dict[str, Any]:
        """The complete element of `choices`."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """What chat and completions differ in. `extra` is told once, at the top: in a whole reply, and in a stream's first chunk."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    choices: Sequence[Choice]
    extra: dict[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=8)
def system_fingerprint(model_name: str, max_model_len: int) -> str:
    """What stays the same as long as the same model is served by the same version."""
    served = f"{installed_version()}\0{model_name}\0{max_model_len}"
    return "fp_" + hashlib.sha256(served.encode("utf-8", "replace")).hexdigest()[:12]


def usage(
    admitted: Sequence[Admitted], outcomes: Sequence[Outcome], copies: int, *, tell_cached: bool = True
) -> dict[str, Any]:
    """OpenAI's usage object, summed over choices. A prompt counts once, however many `copies` of it were continued."""
    prompt_tokens = sum(event.prompt_tokens for event in admitted[::copies])
    completion_tokens = sum(outcome.completion_tokens for outcome in outcomes)
    counted: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    if tell_cached:
        counted["prompt_tokens_details"] = {"cached_tokens": cached_tokens(admitted, copies)}
    return counted


def cached_tokens(admitted: Sequence[Admitted], copies: int) -> int:
    """Prompt tokens that were cached before the request came, as the replicas measured it.

    Of the copies of a prompt all but the first find what the first computes: the least of their counts is what was there before.
    """
    groups = [admitted[start : start + copies] for start in range(0, len(admitted), copies)]
    return sum(min(event.cached_tokens for event in group) for group in groups)


def reply_headers(admitted: Sequence[Admitted], copies: int) -> dict[str, str]:
    """Who answered, how many prompt tokens were cached, and, where a router chose the replica, why it did."""
    replicas = dict.fromkeys(event.replica_id for event in admitted if event.replica_id)
    headers = {
        "x-kvatlas-replica": ",".join(replicas),
        "x-kvatlas-cached-tokens": str(cached_tokens(admitted, copies)),
    }
    routes = _route_header(admitted)
    return headers | {"x-kvatlas-route": routes} if routes else headers


def _route_header(admitted: Sequence[Admitted]) -> str:
    """The distinct routes of `admitted`, in printable ASCII and at most `ROUTE_CHARS` long; a cut ends in "..."."""
    routes = dict.fromkeys(event.route for event in admitted if event.route)
    joined = "".join(char if " " <= char <= "~" else "?" for char in ", ".join(routes)).strip()
    return joined if len(joined) <= ROUTE_CHARS else f"{joined[: ROUTE_CHARS - 3]}..."
