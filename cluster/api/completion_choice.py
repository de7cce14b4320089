"""One choice of a completion reply: text, with the prompt before it on request, log probabilities, token ids."""

from __future__ import annotations

from typing import Any

from actors.request import Delta
from cluster.api.logprobs import CompletionLogprobs, joined
from cluster.api.reply import Outcome


class CompletionChoice:
    """Number `index`. `echo` comes before the answer; `prompt_ids` not None tells the ids of prompt and answer."""

    def __init__(
        self,
        index: int,
        *,
        echo: str = "",
        logprobs: CompletionLogprobs | None = None,
        prompt_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.outcome = Outcome()
        self._index = index
        self._echo = echo
        self._logprobs = logprobs
        self._prompt_ids = prompt_ids
        self._text = [echo]
        self._told: list[dict[str, Any]] = []
        self._ids: list[int] = []

    def opening(self) -> dict[str, Any] | None:
        """What is told of the prompt; completions have no role to announce."""
        if not self._echo and self._prompt_ids is None:
            return None
        return self._chunk(self._echo) | self._about_prompt()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """See `Choice.chunks`."""
        self.outcome.add(delta)
        tells_tokens = bool(delta.token_ids) and (self._logprobs is not None or self._prompt_ids is not None)
        chunks = [self._chunk(delta.text)] if delta.text or tells_tokens else []
        if tells_tokens:
            if self._logprobs is not None:
                chunks[0]["logprobs"] = self._logprobs.take(delta)
            if self._prompt_ids is not None:
                chunks[0]["token_ids"] = list(delta.token_ids)
        if delta.finish_reason is not None:
            chunks.append(self._chunk("") | self._ending())
        return chunks

    def add(self, delta: Delta) -> None:
        """See `Choice.add`."""
        self.outcome.add(delta)
        self._text.append(delta.text)
        if self._logprobs is not None:
            self._told.append(self._logprobs.take(delta))
        if self._prompt_ids is not None:
            self._ids.extend(delta.token_ids)

    def whole(self) -> dict[str, Any]:
        """All text, and the reason."""
        choice = self._chunk("".join(self._text)) | self._ending()
        if self._logprobs is not None:
            choice["logprobs"] = joined(self._told)
        return choice | self._about_prompt() | ({"token_ids": self._ids} if self._prompt_ids is not None else {})

    def _about_prompt(self) -> dict[str, Any]:
        return {} if self._prompt_ids is None else {"prompt_token_ids": list(self._prompt_ids)}

    def _ending(self) -> dict[str, Any]:
        return {"finish_reason": self.outcome.finish_reason, "stop_reason": self.outcome.stop_reason}

    def _chunk(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}
