"""Token ids to text, one sequence, as they come.

A token may hold part of a character, and what a token reads as may depend on those before it (leading spaces). So we
decode a short window of recent tokens and emit what is new. While the window ends in U+FFFD its last character may not
be complete (with byte fallback, one missing byte makes the whole run of bytes read as U+FFFD), so nothing is emitted;
after more tokens than any character takes, only the three are held back that an unfinished one can still decode to.
`flush` emits what never completed.

Streamed and whole text agree because whole text is made here too. Limit: a tokenizer with byte fallback may, on bytes
that form no character, rewrite characters that were complete before; then our text keeps the complete ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

_CONTEXT_TOKENS = range(6, 14)
"""Sizes of context to try: the first that starts on a character's border."""
_WINDOW_TOKENS = 24
_WINDOW_LIMIT = 96
_PATIENCE_TOKENS = 24
_BROKEN = "\ufffd"
_LONGEST_UNFINISHED = 3


class Decoder(Protocol):
    """The part of a transformers tokenizer used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Text of `token_ids`."""
        ...


class Detokenizer:
    """Incremental text of one sequence. `prompt` gives the context that decides on a leading space."""

    def __init__(self, decoder: Decoder, prompt: Seq[int], *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0
        self._held_tokens = 0
        self._restart(list(prompt[-_CONTEXT_TOKENS.stop :]), force=True)
        # Part of a character at the end of the prompt is the prompt's, and so is the character it becomes.
        self._emitted = len(self._decode(self._window))

    def push(self, token: int) -> str:
        """Text that `token` completes; often empty for part of a character."""
        self._window.append(token)
        text = self._decode(self._window)
        unfinished = _unfinished(text)
        self._held_tokens = self._held_tokens + 1 if unfinished else 0
        if 0 < self._held_tokens <= _PATIENCE_TOKENS:
            return ""
        new = text[self._emitted : len(text) - unfinished]
        self._emitted = max(self._emitted, len(text) - unfinished)
        if len(self._window) > _WINDOW_TOKENS:
            # A run of tokens that never form characters must not grow the window, and the cost of a step, without bound.
            self._restart(self._window, force=len(self._window) > _WINDOW_LIMIT)
        return new

    def flush(self) -> str:
        """The sequence ended: text of whatever is still incomplete."""
        text = self._decode(self._window)
        new = text[self._emitted :]
        self._emitted = len(text)
        return new

    def _restart(self, tokens: list[int], *, force: bool) -> None:
        """Shrink the window to a context that reads as whole characters; nothing changes if there is none (unless forced)."""
        for size in _CONTEXT_TOKENS:
            context = tokens[-size:]
            text = self._decode(context)
            if _BROKEN not in text:
                self._window, self._emitted = context, len(text)
                return
        if force:
            self._window = tokens[-_CONTEXT_TOKENS.start :]
            text = self._decode(self._window)
            self._emitted = len(text) - _unfinished(text)

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


def _unfinished(text: str) -> int:
    """How many characters at the end of `text` may still change."""
    held = 0
    while held < _LONGEST_UNFINISHED and held < len(text) and text[len(text) - 1 - held] == _BROKEN:
        held += 1
    return held
