"""A tokenizer that needs no model: one token per UTF-8 byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actors.errors import RequestRefused

TURN = 256
TEMPLATE = "{# role and content of each message, after a turn token #}"


class ByteCodec:
    """Bytes are tokens 0 to 255; 256 starts a conversation's turn, and is special. Records the conversations it rendered.

    `chat_template` is for whoever looks for a way to write tool calls in it; what is rendered does not depend on it.
    """

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, Any]]] = []
        self.renderings: list[dict[str, Any]] = []
        self.chat_template: str | None = TEMPLATE
        self._grammar_tokenizer: Any = None

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, 257)."""
        return 257

    @property
    def longest_token_chars(self) -> int:
        """A token is a byte."""
        return 1

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The turn token."""
        return {"<turn>": TURN}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The UTF-8 bytes of `text`. There are no start tokens."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the bytes."""
        return b"".join(self.token_bytes(token) for token in token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte."""
        return b"<turn>" if token_id == TURN else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        """True of the turn token."""
        return token_id == TURN

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
        """Role and content of each message. As some real templates do, refuses two user messages in a row."""
        self.conversations.append(list(messages))
        self.renderings.append(
            {
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "add_special_tokens": add_special_tokens,
                "variables": dict(variables or {}),
            }
        )
        ids: list[int] = []
        previous = ""
        for message in messages:
            if message["role"] == previous == "user":
                raise RequestRefused("Conversation roles must alternate user/assistant/user/assistant/...", "messages")
            previous = message["role"]
            ids += [TURN, *self.encode(f"{message['role']}\n{message['content']}\n")]
        return ids

    def grammar_tokenizer(self) -> Any:
        """llguidance's own tokenizer of bytes."""
        if self._grammar_tokenizer is None:
            import llguidance

            self._grammar_tokenizer = llguidance.LLTokenizer("byte")
        return self._grammar_tokenizer
