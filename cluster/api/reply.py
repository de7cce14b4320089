"""What a generation sends back, apart from the shape that chat and completions give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.request import Admitted, Delta, FinishReason


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
    """Who answered, and how many prompt tokens it did not compute again."""
    replicas = dict.fromkeys(event.replica_id for event in admitted)
    return {
        "x-kvatlas-replica": ",".join(replicas),
        "x-kvatlas-cached-tokens": str(sum(event.cached_tokens for event in admitted)),
    }
