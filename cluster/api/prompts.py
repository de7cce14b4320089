"""The four forms of a completion prompt, told apart: text, texts, token ids, lists of token ids."""

from __future__ import annotations

from typing import Any

from cluster.api.errors import ApiError, invalid
from cluster.api.text import is_text

MAX_PROMPTS = 256

Prompt = str | list[int]


def split_prompts(value: Any) -> list[Prompt]:
    """One entry per sequence to continue. Raises `ApiError` 400 with param "prompt"."""
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list):
        raise _wrong("must be a string, an array of strings, an array of token ids, or an array of such arrays")
    if not value:
        raise _wrong("must not be empty")
    if all(_is_token_id(item) for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise _wrong(f"holds {len(value)} prompts; one request may hold at most {MAX_PROMPTS}")
    if all(isinstance(item, str) for item in value):
        return [_text(item) for item in value]
    if all(isinstance(item, list) and all(_is_token_id(token) for token in item) for item in value):
        if not all(value):
            raise _wrong("must not be empty")
        return list(value)
    raise _wrong("must not mix strings, integers and arrays, and token ids must be integers")


def _text(value: str) -> str:
    if not value:
        raise _wrong("must not be empty")
    if not is_text(value):
        raise _wrong("must not contain an unpaired surrogate (\\ud800 to \\udfff)")
    return value


def _is_token_id(value: Any) -> bool:
    # A JSON true is an int to Python. The range is checked later, once for all prompts.
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(problem: str) -> ApiError:
    return invalid(f"'prompt' {problem}.", "prompt")
