"""The model directory of the HTTP benchmark is one that an ingress can read."""

from __future__ import annotations

from pathlib import Path

from cluster.bench import http_model
from cluster.ingress import _codec


def test_an_ingress_reads_it(tmp_path: Path) -> None:
    files = http_model.write(tmp_path)
    codec = _codec(files.path)
    assert files.name == http_model.NAME
    assert codec.encode("two words") == codec.encode("two ") + codec.encode("words")
    assert len(codec.encode("x" * 100)) == 100
    # A token for each byte, and one for each of <|user|>, <|end|> and <|assistant|>.
    assert len(codec.render_chat([{"role": "user", "content": "x" * 100}])) == 103
    assert max(codec.render_chat([{"role": "user", "content": "x"}])) < codec.vocab_size
