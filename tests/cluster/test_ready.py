"""The ready block: its numbers, and that a shell really builds the requests it prints."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from cluster.ready import chat_curl, prefix_curl, ready_block

REPLICA: dict[str, Any] = {
    "replica_id": "ab12cd34",
    "mode": "exact",
    "max_model_len": 8192,
    "capacity_blocks": 4096,
    "block_tokens": 16,
    "load_s": {"load": 1.25, "warm-up": 0.5},
    "load_bytes": {"load": 538_000_000},
}


def body_of(line: str) -> dict[str, Any]:
    """What curl would send: the shell runs the line with a curl that prints its -d."""
    line = line.partition(" | grep")[0]
    script = 'curl() { while [ "$1" != -d ]; do shift; done; printf "%s" "$2"; }\n' + line
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    body = json.loads(done.stdout)
    assert isinstance(body, dict)
    return body


def test_the_block_names_what_one_needs() -> None:
    text = ready_block(
        "http://127.0.0.1:8000", "http://127.0.0.1:8080/metrics", "demo", [REPLICA], "private Redis", 12.34
    )
    for part in (
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8080/metrics",
        "4,096 blocks of 16 tokens = 65,536 tokens",
        "exact mode",
        "private Redis",
        "load 538 MB in 1.2 s, warm-up 0.5 s",
        "12.3 s",
        chat_curl("http://127.0.0.1:8000", "demo"),
    ):
        assert part in text


def test_with_keys_the_lines_send_one_that_is_not_printed() -> None:
    text = ready_block("http://x", "", "demo", [REPLICA], "private Redis", 1.0, asks_for_keys=True)
    lines = [line for line in text.splitlines() if line.strip().startswith("curl")]
    assert len(lines) == 2
    for line in lines:
        assert '"authorization: Bearer $OPENAI_API_KEY"' in line
        assert body_of(line.strip())["model"] == "demo"


def test_where_answers_do_not_tell_what_was_cached_nothing_promises_it() -> None:
    text = ready_block("http://x", "", "demo", [REPLICA], "private Redis", 1.0, tells_cached=False)
    assert "cached" not in text
    assert "Ask something" in text
    assert "kvatlas stop" in text


@pytest.mark.parametrize("model", ["demo", 'it\'s "odd" $HOME'])
def test_the_chat_line_asks_for_the_capital(model: str) -> None:
    body = body_of(chat_curl("http://x", model))
    assert body["model"] == model
    assert "capital of France" in body["messages"][0]["content"]


def test_the_prefix_line_is_short_to_read_and_long_to_send() -> None:
    line = prefix_curl("http://x", "org/demo")
    body = body_of(line)
    assert body["model"] == "org/demo"
    assert len(line) < 350
    assert len(body["prompt"].split()) > 250
