"""Text to token ids at the edge: done once per request, here. And back, where a client asks what a token says."""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.errors import ModelRefused, RequestRefused
from cluster.token_bytes import TokenBytes

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

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template, the one for tools where it has several; None without one."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that text is free of where special tokens are skipped, by how they are written."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a completion prompt, with the special tokens that the model expects at the start unless told not to."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included; U+FFFD for bytes that form no character."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, which may be part of a character; nothing for an id that stands for no token."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of text where special tokens are skipped."""
        ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template, by default ready for the assistant's turn.

        `variables` are handed to the template under their names. Raises `actors.errors.RequestRefused` with the template's
        own message where the template rejects the messages, or where the model has no chat template.
        """
        ...

    def grammar_tokenizer(self) -> Any:
        """The tokenizer as llguidance wants it (`llguidance.LLTokenizer`); made at the first call, which may take a second."""
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
        self._bytes = TokenBytes(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        self._special_tokens = {str(token): int(number) for number, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_tokens.values())
        self._grammar_lock = threading.Lock()
        self._grammar_tokenizer: Any = None
        known = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(known) - {"kwargs"} | {"self", "messages", "conversations"}

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self._vocab_size

    @property
    def longest_token_chars(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return self._longest_token_chars

    @property
    def chat_template(self) -> str | None:
        """See `TextCodec.chat_template`."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template if isinstance(template, str) and template else None

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """See `TextCodec.special_tokens`."""
        return self._special_tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `RequestRefused` for half a surrogate pair."""
        _require_unicode(text, "prompt")
        return self._ids(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `TextCodec.decode`."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """See `TextCodec.token_bytes`."""
        return self._bytes.of(token_id)

    def is_special(self, token_id: int) -> bool:
        """See `TextCodec.is_special`."""
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `messages` through the chat template. Raises `RequestRefused`; see `TextCodec`.

        The template writes the special tokens itself, so by default none are added.
        """
        variables = variables or {}
        if not self._tokenizer.chat_template:
            raise RequestRefused("This model has no chat template; use /v1/completions.", "messages")
        taken = sorted(self._reserved.intersection(variables))
        if taken:
            raise RequestRefused(f"'{taken[0]}' is no variable of a chat template.", "chat_template_kwargs")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as exc:  # a template is a program of the model's author: it may fail in any way
            logger.info("the chat template rejected a request: %s", type(exc).__name__)
            reason = str(exc)[:_TEMPLATE_MESSAGE_CHARS] or type(exc).__name__
            raise RequestRefused(f"The model's chat template rejected the messages: {reason}", "messages") from exc
        _require_unicode(text, "messages")
        return self._ids(text, add_special_tokens)

    def grammar_tokenizer(self) -> Any:
        """See `TextCodec.grammar_tokenizer`. Raises `RequestRefused` for a tokenizer that llguidance cannot read."""
        with self._grammar_lock:
            if self._grammar_tokenizer is None:
                self._grammar_tokenizer = self._make_grammar_tokenizer()
            return self._grammar_tokenizer

    def _make_grammar_tokenizer(self) -> Any:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestRefused("This model's tokenizer cannot be used with a grammar.", "response_format")
        ends = self._tokenizer.eos_token_id
        llguidance = importlib.import_module("llguidance")
        try:
            return llguidance.LLTokenizer(backend.to_str(), eos_token=ends)
        except ValueError as exc:
            logger.warning("llguidance cannot read the tokenizer: %s", exc)
            message = "This model's tokenizer cannot be used with a grammar."
            raise RequestRefused(message, "response_format") from exc

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
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
