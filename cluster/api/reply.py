"""What a generation sends back, apart from the shape that chat and completions give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.request import Admitted, Delta, FinishReason

ROUTE_CHARS = 1024
"""Longest x-kvatlas-route: proxies have room for a few kilobytes of headers, and a request may have hundreds of choices."""


class ReplyShape(Protocol):
    """The part of a reply that differs between chat and completions. All methods return one element of `choices`."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first chunk of a choice, before any text; None if there is none."""
        ...

    def text(self, choice: int, text: str) -> dict[str, Any]:
        """A chunk of new text."""
        ...

    def finish(self, choice: int, outcome: Outcome) -> dict[str, Any]:
        """The last chunk of a choice; its text has been sent."""
        ...

    def whole(self, choice: int, outcome: Outcome) -> dict[str, Any]:
        """A complete choice."""
        ...


@dataclass(slots=True)
class Outcome:
    """What one choice has come to so far. Mutated by `add`."""

    parts: list[str] = field(default_factory=list)
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta, *, keep_text: bool) -> None:
        """Take `delta` in. A stream has sent its text already and keeps none of it."""
        self.completion_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        if keep_text:
            self.parts.append(delta.text)

    @property
    def content(self) -> str:
        """The text kept."""
        return "".join(self.parts)


def usage(admitted: Sequence[Admitted], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """OpenAI's usage object, summed over choices; the cached tokens are the replicas' own counts."""
    prompt_tokens = sum(event.prompt_tokens for event in admitted)
    completion_tokens = sum(outcome.completion_tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(event.cached_tokens for event in admitted)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def reply_headers(admitted: Sequence[Admitted]) -> dict[str, str]:
    """Who answered, how many prompt tokens it did not compute again, and, where a router chose it, why it did."""
    replicas = dict.fromkeys(event.replica_id for event in admitted)
    headers = {
        "x-kvatlas-replica": ",".join(replicas),
        "x-kvatlas-cached-tokens": str(sum(event.cached_tokens for event in admitted)),
    }
    routes = _route_header(admitted)
    return headers | {"x-kvatlas-route": routes} if routes else headers


def _route_header(admitted: Sequence[Admitted]) -> str:
    """The distinct routes of `admitted`, in printable ASCII and at most `ROUTE_CHARS` long; a cut ends in "..."."""
    routes = dict.fromkeys(event.route for event in admitted if event.route)
    joined = "".join(char if " " <= char <= "~" else "?" for char in ", ".join(routes)).strip()
    return joined if len(joined) <= ROUTE_CHARS else f"{joined[: ROUTE_CHARS - 3]}..."
