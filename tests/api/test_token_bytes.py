"""What single tokens stand for: of a byte-level vocabulary, and of one with spaces and bytes spelled out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.token_bytes import TokenBytes

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SPELLED = {"<unk>": 0, "\u2581hello": 1, "\u2581": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "x": 6, "<0xGG>": 7}


def byte_level() -> Any:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end é>")
    return fast


def spelled(decoder: Any) -> Any:
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=SPELLED, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoder
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    return fast


BYTE_LEVEL = byte_level()


@given(text=st.text(max_size=20))
def test_bytes_of_all_tokens_are_those_of_the_text(text: str) -> None:
    told = TokenBytes(BYTE_LEVEL)
    ids = BYTE_LEVEL(text, add_special_tokens=False)["input_ids"]
    assert b"".join(told.of(token) for token in ids) == text.encode()


def test_every_byte_has_its_token() -> None:
    told = TokenBytes(BYTE_LEVEL)
    assert sorted(told.of(token) for token in range(256)) == [bytes([byte]) for byte in range(256)]


def test_added_tokens_are_written_as_they_are() -> None:
    assert TokenBytes(BYTE_LEVEL).of(BYTE_LEVEL.eos_token_id) == "<end é>".encode()


def test_ids_without_a_token() -> None:
    told = TokenBytes(BYTE_LEVEL)
    assert told.of(100_000) == b""


def test_spaces_and_bytes_spelled_out() -> None:
    parts = [
        tokenizers.decoders.Replace("\u2581", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
    told = TokenBytes(spelled(tokenizers.decoders.Sequence(parts)))
    expected = [b"<unk>", b" hello", b" ", b"\xe2", b"\x82", b"\xac", b"x", b"<0xGG>"]
    assert [told.of(token) for token in range(8)] == expected


def test_spaces_of_metaspace_and_bytes_without_a_fallback() -> None:
    told = TokenBytes(spelled(tokenizers.decoders.Metaspace()))
    assert told.of(1) == b" hello"
    assert told.of(3) == b"<0xE2>"
