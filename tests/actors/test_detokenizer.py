"""Streamed text: whole characters only, nothing lost, nothing invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from actors.detokenizer import Detokenizer


class Bytes:
    """One token a byte: the hardest splitting there is. Ids from 256 on are special tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert clean_up_tokenization_spaces is False
        return bytes(t for t in token_ids if t < 256).decode("utf-8", "replace")


class ByteFallback:
    """A sentencepiece-like tokenizer: words with a leading mark, bytes for the rest."""

    def __init__(self) -> None:
        vocab = {f"<0x{value:02X}>": value for value in range(256)}
        vocab |= {"▁Daenerys": 256, "▁is": 257, "▁the": 258, "!": 259}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def stream(tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(Bytes(), prompt or [])
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", ["héllo", "😀😀", "한국어", "नमस्ते", "a\u200db", "👩‍👩‍👧", "ab"])
def test_split_characters_come_whole(text: str) -> None:
    pieces = stream(list(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_tail_is_flushed_as_decode_gives_it() -> None:
    tokens = list("é".encode() + "😀".encode()[:3])
    pieces = stream(tokens)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == bytes(tokens).decode("utf-8", "replace")


def test_text_of_the_prompt_is_not_repeated() -> None:
    assert "".join(stream(list(b"world"), prompt=list("héllo ".encode()))) == "world"
    # The prompt ends inside a character: its bytes are the prompt's, the rest stands alone.
    assert "".join(stream(list(b"x"), prompt=list("é".encode()[:1]))) == "x"


def test_spaces_of_sentencepiece_words_stay() -> None:
    decoder = ByteFallback()
    detokenizer = Detokenizer(decoder, [256])
    assert [detokenizer.push(token) for token in (257, 258, 259)] == [" is", " the", "!"]


def test_long_runs_of_fallback_bytes_stay_whole() -> None:
    text = "😀한" * 40
    detokenizer = Detokenizer(ByteFallback(), [256])
    pieces = [detokenizer.push(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text


def test_a_prompt_full_of_broken_characters_keeps_the_space_behind_it() -> None:
    prompt = list("\ufffd".encode()) * 6
    detokenizer = Detokenizer(ByteFallback(), prompt)
    pieces = [detokenizer.push(token) for token in (257, 258)]
    assert "".join(pieces) + detokenizer.flush() == " is the"


def test_written_out_replacement_characters_do_not_spoil_what_follows() -> None:
    text = "aa\ufffd\ufffd😀😀你"
    detokenizer = Detokenizer(ByteFallback(), [256])
    pieces = [detokenizer.push(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text


def test_bytes_that_never_form_a_character_do_not_grow_the_window() -> None:
    detokenizer = Detokenizer(Bytes(), [])
    text = "".join(detokenizer.push(0x80) for _ in range(5000)) + detokenizer.flush()
    assert text == "\ufffd" * 5000
    assert len(detokenizer._window) < 200


@given(st.binary(max_size=120), st.text(max_size=10))
def test_any_bytes_give_what_decoding_at_once_gives(data: bytes, prompt: str) -> None:
    pieces = stream(list(data), prompt=list(prompt.encode()))
    assert "".join(pieces) == data.decode("utf-8", "replace")


@given(st.text(max_size=80))
def test_valid_text_never_shows_a_broken_character(text: str) -> None:
    pieces = stream(list(text.encode()))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
