"""`kvatlas explain` against the HTTP app: what is asked, what is printed, and how it refuses."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.errors import ReplicaFailed
from cluster import ports, server_state
from cluster.cli.target import KEY_VARIABLE
from tests.cluster.command import Command, Done, assert_one_sentence
from tests.cluster.conftest import ADMIN_KEY
from tests.fakes.engine import EXPLAINED, FakeEngine


@pytest.fixture
def explain(kvatlas: Command, served_url: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command with the admin key, about the served app."""
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)

    def run(*arguments: str) -> Done:
        return kvatlas("explain", *arguments, "--url", served_url)

    return run


def asked(engine: FakeEngine) -> str:
    """The prompt that was asked about, as text."""
    (request,) = engine.explained
    return bytes(token for token in request.prompt_token_ids if token < 256).decode()


def test_the_table_has_the_best_first_and_a_column_for_each_term(explain: Command) -> None:
    done = explain("Once upon a time")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "choice     r0: longest cached prefix (cost, prefix_hit)"
    assert lines[1] == "prompt     60 tokens, 48 expected to be cached there"
    assert lines[2] == "directory  live, lag 0.004 s, 0 entries behind"
    assert lines[3].split() == [
        "REPLICA",
        "POOL",
        "POOL",
        "SEQ",
        *["MATCHED", "PROMISED", "CACHED", "QUEUED", "RUNNING", "PREFILL", "QUEUE", "SCORE"],
    ]
    assert lines[4].split() == [*["tokens"] * 4, "requests", "tokens/s", "s", "s"]
    assert lines[5].split() == ["r0", "p0", "9", "48", "0", "48", "1,200", "2", "1,000", "1.2000", "1.2500"]
    assert lines[6].split() == ["r9", "-", "-", "-", "-", "0", "0", "0", "0.0000", "-", "-"]
    assert lines[7] == "not in the directory: r9"
    assert max(map(len, lines)) <= 120


def test_json_is_what_the_server_told(explain: Command) -> None:
    assert json.loads(explain("Hi", "--json").stdout) == EXPLAINED


def test_text_is_what_a_user_says_or_a_bare_prompt(explain: Command, engine: FakeEngine) -> None:
    explain("Hi there")
    assert "user" in asked(engine)
    engine.explained.clear()
    explain("Hi there", "--completion")
    assert asked(engine) == "Hi there"
    assert engine.requests == []


def test_a_file_is_a_text(explain: Command, engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    assert explain("--file", str(file), "--completion").returncode == 0
    assert asked(engine) == "Grüße\n"


def test_standard_input_is_a_file(explain: Command, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert explain("--file", "-", "--completion").returncode == 0
    assert asked(engine) == "from a pipe"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": "told"}]}, "told"),
        ({"model": "tiny", "prompt": "told", "max_tokens": 3}, "told"),
        ({"prompt": [104, 105]}, "hi"),
    ],
)
def test_a_file_may_be_a_request_body(
    explain: Command, engine: FakeEngine, tmp_path: Path, body: dict[str, Any], words: str
) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    assert explain("--file", str(file)).returncode == 0
    assert words in asked(engine)


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", '"text"', "{", '{"prompt": ', "7"])
def test_other_json_is_text(explain: Command, engine: FakeEngine, tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    explain("--file", str(file), "--completion")
    assert asked(engine) == text


def test_a_prompt_given_as_an_argument_is_text_whatever_it_looks_like(explain: Command, engine: FakeEngine) -> None:
    explain('{"prompt": "x"}', "--completion")
    assert asked(engine) == '{"prompt": "x"}'


@pytest.mark.parametrize("arguments", [[], ["Hi", "--file", "f"], [""]])
def test_one_prompt_is_needed(explain: Command, arguments: list[str]) -> None:
    assert_one_sentence(explain(*arguments), 2, "--file", "one of them")


def test_a_file_that_cannot_be_read(explain: Command, tmp_path: Path) -> None:
    assert_one_sentence(explain("--file", str(tmp_path / "nothing")), 2, "nothing", "No such file")
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff\xfe\x00")
    assert_one_sentence(explain("--file", str(file)), 2, "not UTF-8")


def test_a_request_that_is_refused_says_why(explain: Command, tmp_path: Path) -> None:
    assert_one_sentence(explain("x" * 4000), 2, "maximum context length")
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"model": "another", "prompt": "x"}))
    assert_one_sentence(explain("--file", str(file)), 2, "another", "does not exist")


def test_no_replica(explain: Command, engine: FakeEngine) -> None:
    engine.explanation = ReplicaFailed("No replica is available.")
    assert explain("Hi").returncode == 1


def test_keys(explain: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    assert_one_sentence(explain("Hi"), 2, KEY_VARIABLE)
    monkeypatch.delenv(KEY_VARIABLE)
    assert_one_sentence(explain("Hi"), 2, KEY_VARIABLE)


def test_nothing_answers(kvatlas: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)
    url = f"http://127.0.0.1:{ports.choose('127.0.0.1', 0)}"
    assert_one_sentence(kvatlas("explain", "Hi", "--url", url), 1, url)


def test_the_server_running_here_is_found(kvatlas: Command, served_url: str, tmp_path: Path) -> None:
    state = server_state.here("127.0.0.1", 1234, served_url, "tiny", ADMIN_KEY)
    server_state.write(tmp_path / "run", state)
    assert_one_sentence(kvatlas("explain", "Hi"), 1, "still starting")
    server_state.write(tmp_path / "run", replace(state, metrics_url="http://metrics"))
    assert kvatlas("explain", "Hi").returncode == 0
    assert kvatlas("explain", "Hi", "--port", "1234").returncode == 0
