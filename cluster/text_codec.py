"""Text to token ids at the edge: done once per request, here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.errors import ModelRefused, RequestRefused

logger = logging.getLogger(__name__)

_TEMPLATE_MESSAGE_CHARS = 300


class TextCodec(Protocol):
    """Tokenizer and chat template of the served model."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    @property
    def longest_token_chars(self) -> int:
        """No token stands for more characters than this."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a completion prompt, with the special tokens the model expects at the start."""
        ...

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for the assistant's turn.

        Raises `actors.errors.RequestRefused` with the template's own message where the template rejects the messages,
        or where the model has no chat template.
        """
        ...


class TransformersCodec:
    """The tokenizer in a model directory. Safe to use from several threads at once.

    `model_vocab_size` is the number of rows of the model's embedding: ids beyond it would read outside the weights,
    whatever the tokenizer says. transformers is imported here, not with the module: the edge's tests do without it.
    """

    def __init__(self, directory: Path, model_vocab_size: int) -> None:
        transformers = importlib.import_module("transformers")
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError) as exc:
            raise ModelRefused(f"{directory} holds no tokenizer that transformers can load: {exc}") from exc
        self._vocab_size = min(_tokenizer_ids(self._tokenizer), model_vocab_size)
        # A byte-level token's spelling has one character a byte, so it is never shorter than its text.
        self._longest_token_chars = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # Settings saved with the tokenizer would cut or pad prompts; and resetting them on first use, while another
            # thread encodes, fails with "Already borrowed".
            backend.no_truncation()
            backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self._vocab_size

    @property
    def longest_token_chars(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return self._longest_token_chars

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` with its start tokens. Raises `RequestRefused` for half a surrogate pair."""
        _require_unicode(text, "prompt")
        ids = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        return [int(token) for token in ids]

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of `messages` through the chat template. Raises `RequestRefused`; see `TextCodec`.

        The template writes the special tokens itself, so none are added.
        """
        if not self._tokenizer.chat_template:
            raise RequestRefused("This model has no chat template; use /v1/completions.", "messages")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as exc:  # a template is a program of the model's author: it may fail in any way
            logger.info("the chat template rejected a request", exc_info=exc)
            reason = str(exc)[:_TEMPLATE_MESSAGE_CHARS] or type(exc).__name__
            raise RequestRefused(f"The model's chat template rejected the messages: {reason}", "messages") from exc
        _require_unicode(text, "messages")
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(token) for token in ids]


def _tokenizer_ids(tokenizer: Any) -> int:
    """One more than the highest id. Not the number of entries: a vocabulary may have holes."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _require_unicode(text: str, param: str) -> None:
    """Tokenizers are Rust and take UTF-8 only: they raise TypeError for half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestRefused("Text must not contain an unpaired surrogate.", param) from None
