"""`kvatlas explain` against the HTTP app: what is asked, what is printed, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.errors import ReplicaFailed
from cluster import ports, server_state
from cluster.cli.explain import SUM, TERMS
from cluster.cli.target import KEY_VARIABLE
from cluster.explanation import explanation
from router.policy import POLICIES
from router.route_config import PolicyName
from tests.cluster.command import Command, Done, assert_one_sentence
from tests.cluster.conftest import ADMIN_KEY
from tests.fakes.engine import EXPLAINED, FakeEngine
from tests.router.scene import Scene, keys


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


def test_what_was_seen_and_what_the_policy_made_of_it_are_two_tables(explain: Command) -> None:
    done = explain("Once upon a time")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "choice     r0: longest cached prefix (cost, prefix_hit)"
    assert lines[1] == "prompt     60 tokens, 48 expected to be cached there; answer: 16 tokens at most"
    assert lines[2] == "directory  live, lag 0.004 s, 0 entries behind"
    heads = [number for number, line in enumerate(lines) if line.startswith("REPLICA")]
    seen, terms = (lines[number : number + 4] for number in heads)
    assert seen[0].split() == ["REPLICA", "POOL", "LISTED", "COMING", "HIT", "QUEUED", "RUNNING", "LEARNED"]
    assert seen[1].split() == [*["tokens"] * 4, "tokens/s"]
    assert seen[2].split() == ["r0", "p0", "48", "0", "48", "1,200", "2", "1,000"]
    assert terms[0].split() == ["REPLICA", "SCORE", "QUEUE"]
    assert terms[1].split() == ["s", "s"]
    assert terms[2].split() == ["r0", "1.2500", "1.2000"]
    assert terms[3].split() == ["r9", "-", "-"]
    assert lines[-1] == "not in the directory: r9"


def candidate(policy: PolicyName, outcome: str) -> dict[str, Any]:
    """What the router tells of a candidate with large numbers, decided by this policy."""
    scene = Scene(policy, directory=outcome != "fallback")
    names = [f"0123456789abcdef{number:02d}"[-8:] for number in range(2)]
    for name in names:
        scene.hear(name, held=range(50), queued_prefill_tokens=123_456_789)
    decision = scene.service.explain(keys(1, 2), 1_234_567, 1_048_576, names)
    found = explanation(decision, 1_234_567, 1_048_576, scene.service.report()["directory"])
    for one in found["candidates"]:
        one |= {"pool": "kvatlas-0123456789abcdef-0123456789abcdef"}
        one |= {name: 123_456_789 for name in ("held_tokens", "free_tokens") if one[name] is not None}
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("outcome", ["any", "fallback"])
def test_it_fits_120_columns_names_each_column_once_and_explains_it(
    explain: Command, engine: FakeEngine, policy: PolicyName, outcome: str
) -> None:
    engine.explanation = candidate(policy, outcome)
    lines = explain("Hi").stdout.splitlines()
    assert max(map(len, lines)) <= 120
    for head in (line for line in lines if line.startswith("REPLICA")):
        names = re.split(r"\s{2,}", head)
        assert len(names) == len(set(names))
        for name in set(names) - {"REPLICA", "POOL"}:
            assert any(re.search(rf"(^|  ){name} +\S", line) for line in lines if not line.startswith("REPLICA")), name


def test_the_terms_of_cost_are_summed_as_the_text_says(explain: Command, engine: FakeEngine) -> None:
    engine.explanation = candidate("cost", "any")
    names = {
        head: name
        for name, (head, _) in TERMS.items()
        if name.endswith("_s") and name in engine.explanation["candidates"][0]
    }
    for one in engine.explanation["candidates"]:
        assert sum(one[names[head]] for head in SUM.split(" + ")) == pytest.approx(one["score"])
    assert SUM in explain("Hi").stdout


def test_what_a_fallback_does_not_know_is_not_shown_as_nothing(explain: Command, engine: FakeEngine) -> None:
    engine.explanation = candidate("cost", "fallback")
    lines = explain("Hi").stdout.splitlines()
    assert "how much of it is cached is not known" in lines[1]
    head = next(line for line in lines if line.startswith("REPLICA"))
    assert not {"HIT", "FREE", "LEARNED", "WAITING", "LISTED"} & set(head.split())
    assert {"QUEUED", "RUNNING"} <= set(head.split())


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


@pytest.mark.parametrize("text", ["{'a': 1}", "[1, 2]", '"text"', "{", '{"prompt": ', "7"])
def test_other_json_is_text(explain: Command, engine: FakeEngine, tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    explain("--file", str(file), "--completion")
    assert asked(engine) == text


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '{"message": []}'])
@pytest.mark.parametrize("options", [[], ["--completion"]])
def test_an_object_that_is_no_request_is_refused(
    explain: Command, engine: FakeEngine, tmp_path: Path, text: str, options: list[str]
) -> None:
    file = tmp_path / "body.json"
    file.write_text(text)
    assert_one_sentence(explain("--file", str(file), *options), 2, '"messages"', '"prompt"')
    assert engine.explained == []


def test_an_empty_file_is_refused_as_an_empty_prompt_is(
    explain: Command, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    assert_one_sentence(explain("--file", str(tmp_path / "empty")), 2, "is empty")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert_one_sentence(explain("--file", "-"), 2, "Standard input is empty")
    assert engine.explained == []


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


@pytest.mark.parametrize("key", ["a\nb", "a\rb", "schlüssel", "a\x00b", "\udcff", "\u2028"])
def test_a_key_that_no_header_takes(explain: Command, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(
        os, "environ", os.environ | {KEY_VARIABLE: key}
    )  # where it need not be one that a process can have
    done = explain("Hi")
    assert_one_sentence(done, 2, "admin key")
    assert "schl" not in done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://a b",
        "http://h:99999999",
        "http://h:port",
        "http://ü\x00",
        "http://\udcff/",
        "ftp://h",
        "x",
    ],
)
@pytest.mark.parametrize("key", [ADMIN_KEY, ""])
def test_an_address_that_is_none(kvatlas: Command, monkeypatch: pytest.MonkeyPatch, url: str, key: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    done = kvatlas("explain", "Hi", "--url", url)
    assert done.returncode in (1, 2)
    assert_one_sentence(done, done.returncode, "address")


def test_a_wrong_address_is_said_before_a_key_is_asked_for(kvatlas: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    url = f"http://127.0.0.1:{ports.choose('127.0.0.1', 0)}"
    assert_one_sentence(kvatlas("explain", "Hi", "--url", url), 1, url, "Nothing answers")


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
