"""The bytes that single tokens stand for.

A tokenizer decodes whole sequences; one token of its own may be part of a character, and decoding it says U+FFFD then. The
bytes are in the vocabulary's spelling, in one of two ways:

- byte-level vocabularies (GPT-2's way) spell each byte as one printable character, of a fixed table;
- the others spell text as it is, a space often as U+2581, and single bytes as `<0xE2>`.

Added tokens are spelled as they are in both. Limit: a decoder that does more than that (word pieces that join with "##") is
not undone; the spelling counts then.
"""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_table() -> dict[str, int]:
    """Character to byte, as GPT-2 has it: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_TABLE = _byte_table()


class TokenBytes:
    """Of the tokens of a transformers `tokenizer`. Safe to use from several threads; remembers what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder, replaces_space = _decoder(tokenizer)
        self._byte_level = "ByteLevel" in decoder
        self._byte_fallback = "ByteFallback" in decoder
        self._replaces_space = replaces_space
        self._added = {int(token): str(content) for token, content in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes of the token; empty for an id without one."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "replace")
        spelling = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(spelling, str):
            return b""
        if self._byte_level and all(char in _TABLE for char in spelling):
            return bytes(_TABLE[char] for char in spelling)
        single = _BYTE.fullmatch(spelling) if self._byte_fallback else None
        if single is not None:
            return bytes([int(single[1], 16)])
        return (spelling.replace(_SPACE, " ") if self._replaces_space else spelling).encode("utf-8", "replace")


def _decoder(tokenizer: Any) -> tuple[frozenset[str], bool]:
    """The kinds of the decoder's parts, and whether one of them writes spaces for U+2581."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return frozenset(), True
    described = json.loads(decoder.__getstate__())
    parts = described.get("decoders", []) if described.get("type") == "Sequence" else [described]
    kinds = frozenset(str(part.get("type")) for part in parts)
    replaced = any(part.get("pattern", {}).get("String") == _SPACE for part in parts if part.get("type") == "Replace")
    return kinds, replaced or "Metaspace" in kinds
