"""Log probabilities as the two routes write them.

A token that is part of a character cannot be told as text, so its bytes are spelled out: `\\xf0\\x9f` for chat, where the
field `bytes` has them too, and `bytes:\\xf0\\x9f` for completions, which have no such field. With `return_tokens_as_token_ids`
every token is `token_id:123`. No value is below -9999, which stands for "impossible": JSON has no infinity.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any

from actors.request import Delta, TokenLogprob
from cluster.text_codec import TextCodec

FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written in replies. `prefix` starts the spelling of one that is no text."""

    codec: TextCodec
    as_ids: bool = False
    prefix: str = ""

    def of(self, token_id: int) -> str:
        """The text of the token, or what stands for it."""
        if self.as_ids:
            return f"token_id:{token_id}"
        raw = self.codec.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return self.prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, delta: Delta) -> dict[str, Any]:
    """The `logprobs` of a chat choice for the tokens of `delta`."""
    content = []
    for token_id, told in zip(delta.token_ids, delta.logprobs, strict=True):
        top = [_chat_entry(names, other, logprob) for other, logprob in told.top]
        content.append(_chat_entry(names, token_id, told.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = names.codec.token_bytes(token_id)
    return {"token": names.of(token_id), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The `logprobs` of one completion choice; keeps count of where in the text its tokens begin."""

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._skip_special = skip_special_tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, delta: Delta) -> dict[str, Any]:
        """The entries for the tokens of `delta`, which must come in order."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token_id, told in zip(delta.token_ids, delta.logprobs, strict=True):
            tokens.append(self._names.of(token_id))
            logprobs.append(finite(told.logprob))
            tops.append(self._top(token_id, told))
            offsets.append(self._offset)
            if not (self._skip_special and self._names.codec.is_special(token_id)):
                self._offset += len(self._characters.decode(self._names.codec.token_bytes(token_id)))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token_id: int, told: TokenLogprob) -> dict[str, float]:
        """The likeliest and the chosen one. Of two tokens with one spelling the likelier counts."""
        top: dict[str, float] = {}
        for other, logprob in (*told.top, (token_id, told.logprob)):
            top.setdefault(self._names.of(other), finite(logprob))
        return top


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several `logprobs` objects of one choice, in order, as one."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, list):
                whole.setdefault(name, []).extend(value)
            else:
                whole[name] = value
    return whole


def finite(logprob: float) -> float:
    """`logprob` as JSON can hold it: not below `FLOOR`, which is also what NaN becomes."""
    return logprob if logprob > FLOOR else FLOOR
