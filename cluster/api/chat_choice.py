"""One choice of a chat reply: content, tool calls, log probabilities, token ids.

Text of a model that may call tools passes a `ToolReader`, which takes calls out of it. In a stream each of its parts is a
chunk of its own; what belongs to the tokens (log probabilities, ids) goes with the first one, or with a chunk of no content
where the text is still held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.request import Delta, FinishReason
from cluster.api.logprobs import TokenNames, chat_logprobs, joined
from cluster.api.reply import Outcome
from cluster.api.tool_reader import CallArguments, CallStart, Content, Part, ToolReader


class ChatChoice:
    """Number `index`. `names` None tells no log probabilities; without a `reader` all text is content."""

    def __init__(
        self, index: int, *, names: TokenNames | None = None, reader: ToolReader | None = None, tell_ids: bool = False
    ) -> None:
        self.outcome = Outcome()
        self._index = index
        self._names = names
        self._reader = reader
        self._tell_ids = tell_ids
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._ids: list[int] = []

    def opening(self) -> dict[str, Any]:
        """The role, once, with empty content."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """See `Choice.chunks`."""
        self.outcome.add(delta)
        chunks = [self._chunk(_as_delta(part)) for part in self._parts(delta)]
        if delta.token_ids and (self._names is not None or self._tell_ids):
            if not chunks:
                chunks = [self._chunk({"content": ""})]
            chunks[0] |= self._about_tokens(delta)
        if delta.finish_reason is not None:
            ending = {"finish_reason": self._finish_reason(), "stop_reason": self.outcome.stop_reason}
            chunks.append(self._chunk({}) | ending)
        return chunks

    def add(self, delta: Delta) -> None:
        """See `Choice.add`."""
        self.outcome.add(delta)
        for part in self._parts(delta):
            self._keep(part)
        if self._names is not None:
            self._logprobs.append(chat_logprobs(self._names, delta))
        if self._tell_ids:
            self._ids.extend(delta.token_ids)

    def whole(self) -> dict[str, Any]:
        """The assistant's message; its content is null when it says nothing beside its calls."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": "".join(arguments)}}
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return {
            "index": self._index,
            "message": message,
            "logprobs": joined(self._logprobs) if self._names is not None else None,
            "finish_reason": self._finish_reason(),
            "stop_reason": self.outcome.stop_reason,
        } | ({"token_ids": self._ids} if self._tell_ids else {})

    def _parts(self, delta: Delta) -> Sequence[Part]:
        if self._reader is None:
            return [Content(delta.text)] if delta.text else []
        parts = self._reader.push(delta.text) if delta.text else []
        return [*parts, *self._reader.finish()] if delta.finish_reason is not None else parts

    def _keep(self, part: Part) -> None:
        if isinstance(part, Content):
            self._content.append(part.text)
        elif isinstance(part, CallStart):
            self._calls.append(_call(part))
            self._arguments.append([])
        else:
            self._arguments[part.index].append(part.text)

    def _finish_reason(self) -> FinishReason | str | None:
        """An answer that was cut off says so, also where it was cut off in a call or after one."""
        called = self._reader is not None and self._reader.called
        return "tool_calls" if called and self.outcome.finish_reason == "stop" else self.outcome.finish_reason

    def _about_tokens(self, delta: Delta) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self._names is not None:
            about["logprobs"] = chat_logprobs(self._names, delta)
        if self._tell_ids:
            about["token_ids"] = list(delta.token_ids)
        return about

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}


def _as_delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, CallArguments):
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
    return {"tool_calls": [{"index": part.index} | _call(part)]}


def _call(start: CallStart) -> dict[str, Any]:
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": ""}}
