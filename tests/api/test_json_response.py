"""JSON on one line, whatever the text."""

from __future__ import annotations

import json

import pytest

from cluster.api.json_response import encode_json


@pytest.mark.parametrize(
    "text", ["", "plain", "caf\u00e9", "a\u2028b", "a\u2029b", "a\x85b", "\x0b\x0c\x1c\x1d\x1e\n\r", "\\u2028"]
)
def test_it_is_one_line_to_every_reader_and_says_the_same(text: str) -> None:
    encoded = encode_json({"text": text}).decode()
    assert len(encoded.splitlines()) == 1
    assert json.loads(encoded) == {"text": text}


def test_half_a_surrogate_becomes_a_question_mark() -> None:
    assert json.loads(encode_json("a\ud800")) == "a?"
