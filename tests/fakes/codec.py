"""A tokenizer that needs no model: one token per UTF-8 byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.errors import RequestRefused


class ByteCodec:
    """Bytes are tokens 0 to 255; 256 starts a conversation's turn. Records the conversations it rendered."""

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, Any]]] = []

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, 257)."""
        return 257

    @property
    def longest_token_chars(self) -> int:
        """A token is a byte."""
        return 1

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Role and content of each message. As some real templates do, refuses two user messages in a row."""
        self.conversations.append(list(messages))
        ids: list[int] = []
        previous = ""
        for message in messages:
            if message["role"] == previous == "user":
                raise RequestRefused("Conversation roles must alternate user/assistant/user/assistant/...", "messages")
            previous = message["role"]
            ids += [256, *self.encode(f"{message['role']}\n{message['content']}\n")]
        return ids
