"""A strict reader of event streams: it accepts what OpenAI's clients are promised, and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
ENVELOPE_KEYS = {"message", "type", "param", "code"}


@dataclass
class Transcript:
    """A stream, read: text and finish reason by choice, usage and error if they were there."""

    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    head: dict[str, Any] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)


def read_stream(raw: bytes, *, chat: bool, choices: int = 1, include_usage: bool = False) -> Transcript:
    """The transcript of a complete stream. Raises AssertionError at the first deviation."""
    transcript = Transcript()
    payloads = _payloads(raw)
    assert payloads[-1] == DONE, "the stream must end with [DONE]"
    assert DONE not in payloads[:-1], "[DONE] comes once"
    for payload in payloads[:-1]:
        assert transcript.error is None, "nothing but [DONE] follows an error"
        assert transcript.usage is None, "nothing but [DONE] follows the usage"
        chunk = json.loads(payload, object_pairs_hook=_no_duplicates)
        if "error" in chunk:
            assert chunk.keys() == {"error"}
            assert chunk["error"].keys() == ENVELOPE_KEYS
            transcript.error = chunk["error"]
            continue
        _read_chunk(transcript, chunk, chat, include_usage)
    if transcript.error is None:
        assert set(transcript.finish) == set(range(choices)), "every choice finishes"
        assert (transcript.usage is not None) == include_usage
    return transcript


def _payloads(raw: bytes) -> list[str]:
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), "the last event must be complete"
    events = text[:-2].split("\n\n")
    for event in events:
        assert event.startswith("data: "), f"not a data event: {event!r}"
        assert "\n" not in event, "one line per event"
        assert "\r" not in event
    return [event.removeprefix("data: ") for event in events]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), "a key appears twice"
    return dict(pairs)


def _read_chunk(transcript: Transcript, chunk: dict[str, Any], chat: bool, include_usage: bool) -> None:
    keys = {"id", "object", "created", "model", "choices"} | ({"usage"} if include_usage else set())
    assert chunk.keys() == keys
    head = {name: chunk[name] for name in ("id", "object", "created", "model")}
    transcript.head = transcript.head or head
    assert head == transcript.head, "id, object, created and model stay the same"
    assert chunk["object"] == ("chat.completion.chunk" if chat else "text_completion")
    assert isinstance(chunk["created"], int)
    transcript.chunks.append(chunk)
    if chunk["choices"]:
        assert chunk.get("usage") is None
        (choice,) = chunk["choices"]
        _read_choice(transcript, choice, chat)
    else:
        assert include_usage, "empty choices belong to the usage chunk only"
        _check_usage(chunk["usage"])
        transcript.usage = chunk["usage"]


def _read_choice(transcript: Transcript, choice: dict[str, Any], chat: bool) -> None:
    index, reason = choice["index"], choice["finish_reason"]
    keys = {"index", "logprobs", "finish_reason", "delta" if chat else "text"}
    assert choice.keys() == (keys if reason is None else keys | {"stop_reason"})
    assert index not in transcript.finish, "nothing follows a finish reason"
    text = _delta_text(transcript, index, choice["delta"], reason) if chat else choice["text"]
    assert text or reason or (chat and index not in transcript.texts), "an empty chunk says nothing"
    transcript.texts[index] = transcript.texts.get(index, "") + text
    if reason is not None:
        assert reason in {"stop", "length", "tool_calls", "content_filter"}
        assert not text, "text and finish reason come apart"
        transcript.finish[index] = reason


def _delta_text(transcript: Transcript, index: int, delta: dict[str, Any], reason: str | None) -> str:
    if index not in transcript.texts:
        assert delta == {"role": "assistant", "content": ""}, "the first delta is the role"
    elif reason is not None:
        assert delta == {}
    else:
        assert delta.keys() == {"content"}
    return str(delta.get("content", ""))


def _check_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
