"""A strict reader of event streams: it accepts what OpenAI's clients are promised, and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
ENVELOPE_KEYS = {"message", "type", "param", "code"}
COMMENT = ": keep-alive"


@dataclass
class Transcript:
    """A stream, read: text, calls, log probabilities and finish reason by choice; usage and error if they were there."""

    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    prompt_token_ids: dict[int, list[int]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    head: dict[str, Any] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0


def read_stream(
    raw: bytes, *, chat: bool, choices: int = 1, include_usage: bool = False, usage_always: bool = False
) -> Transcript:
    """The transcript of a complete stream. Raises AssertionError at the first deviation."""
    transcript = Transcript()
    payloads = _payloads(transcript, raw)
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
        _read_chunk(transcript, chunk, chat, include_usage, usage_always)
    if transcript.error is None:
        assert set(transcript.finish) == set(range(choices)), "every choice finishes"
        assert (transcript.usage is not None) == include_usage
    for calls in transcript.calls.values():
        for call in calls:
            if transcript.error is None and set(transcript.finish.values()) == {"tool_calls"}:
                json.loads(call["function"]["arguments"])
    return transcript


def _payloads(transcript: Transcript, raw: bytes) -> list[str]:
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), "the last event must be complete"
    events = text[:-2].split("\n\n")
    transcript.comments = events.count(COMMENT)
    events = [event for event in events if event != COMMENT]
    for event in events:
        assert event.startswith("data: "), f"not a data event: {event!r}"
        assert "\n" not in event, "one line per event"
        assert "\r" not in event
    return [event.removeprefix("data: ") for event in events]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), "a key appears twice"
    return dict(pairs)


def _read_chunk(
    transcript: Transcript, chunk: dict[str, Any], chat: bool, include_usage: bool, usage_always: bool
) -> None:
    keys = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    keys |= {"usage"} if include_usage or usage_always else set()
    if chat and not transcript.chunks and "prompt_token_ids" in chunk:
        transcript.prompt_token_ids[0] = chunk["prompt_token_ids"]
        keys.add("prompt_token_ids")
    assert chunk.keys() == keys
    head = {name: chunk[name] for name in ("id", "object", "created", "model", "system_fingerprint")}
    transcript.head = transcript.head or head
    assert head == transcript.head, "what all chunks have in common stays the same"
    assert chunk["object"] == ("chat.completion.chunk" if chat else "text_completion")
    assert isinstance(chunk["created"], int)
    transcript.chunks.append(chunk)
    if usage_always:
        _check_usage(chunk["usage"])
    if chunk["choices"]:
        assert usage_always or chunk.get("usage") is None
        (choice,) = chunk["choices"]
        _read_choice(transcript, choice, chat)
    else:
        assert include_usage, "empty choices belong to the usage chunk only"
        _check_usage(chunk["usage"])
        transcript.usage = chunk["usage"]


def _read_choice(transcript: Transcript, choice: dict[str, Any], chat: bool) -> None:
    index, reason = choice["index"], choice["finish_reason"]
    keys = {"index", "logprobs", "finish_reason", "delta" if chat else "text"}
    keys |= {"stop_reason"} if reason is not None else set()
    assert choice.keys() - {"token_ids", "prompt_token_ids"} == keys
    assert index not in transcript.finish, "nothing follows a finish reason"
    says = _read_tokens(transcript, choice)
    text = _read_delta(transcript, index, choice["delta"], reason, says) if chat else choice["text"]
    first = chat and index not in transcript.texts
    assert text or reason or first or says, "an empty chunk says nothing"
    transcript.texts[index] = transcript.texts.get(index, "") + (text if isinstance(text, str) else "")
    if reason is not None:
        assert reason in {"stop", "length", "tool_calls", "content_filter"}
        assert not text, "text and finish reason come apart"
        assert not says
        transcript.finish[index] = reason


def _read_tokens(transcript: Transcript, choice: dict[str, Any]) -> bool:
    """Take in what the chunk says of tokens; whether it says anything of them."""
    index = choice["index"]
    if "prompt_token_ids" in choice:
        assert index not in transcript.prompt_token_ids, "the prompt's ids come once"
        transcript.prompt_token_ids[index] = choice["prompt_token_ids"]
    if "token_ids" in choice:
        transcript.token_ids.setdefault(index, []).extend(choice["token_ids"])
    for name, values in (choice["logprobs"] or {}).items():
        if name != "refusal":
            transcript.logprobs.setdefault(index, {}).setdefault(name, []).extend(values)
    return bool(choice["logprobs"]) or "token_ids" in choice or "prompt_token_ids" in choice


def _read_delta(transcript: Transcript, index: int, delta: dict[str, Any], reason: str | None, says: bool) -> Any:
    """The content of `delta`, or its calls."""
    if index not in transcript.texts:
        assert delta == {"role": "assistant", "content": ""}, "the first delta is the role"
        return ""
    if reason is not None:
        assert delta == {}
        return ""
    if "tool_calls" in delta:
        assert delta.keys() == {"tool_calls"}
        (call,) = delta["tool_calls"]
        _read_call(transcript.calls.setdefault(index, []), call)
        return delta["tool_calls"]
    assert delta.keys() == {"content"}
    assert delta["content"] or says
    return delta["content"]


def _read_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    function = call["function"]
    if call["index"] == len(calls):
        assert call.keys() == {"index", "id", "type", "function"}
        assert function.keys() == {"name", "arguments"}
        assert call["id"]
        calls.append({"id": call["id"], "type": call["type"], "function": dict(function)})
    else:
        assert call["index"] == len(calls) - 1, "calls come one after the other"
        assert call.keys() == {"index", "function"}
        assert function.keys() == {"arguments"}
        assert function["arguments"]
        calls[-1]["function"]["arguments"] += function["arguments"]


def _check_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if "prompt_tokens_details" in usage:
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
