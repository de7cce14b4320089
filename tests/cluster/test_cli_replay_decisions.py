"""`kvatlas replay --decisions`: what is printed of a log, and how one that is none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import replay_decisions
from cluster.errors import UsageError
from router.decision import RouteDecision
from router.decision_record import Measured, Record, decided, to_line
from router.policy import POLICIES
from tests.router.decisions import PROMPT_TOKENS, a_decision, a_ticket, a_view


@pytest.fixture(autouse=True)
def _environment(env: dict[str, str]) -> None:
    """No options of the machine's."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Ten decisions of `cost` that keep away from a busy holder, one fallback, two measured."""
    busy = a_view(cached=(0, 160, 0), queued=(0, 900, 0))
    scored = a_decision("cost", busy)
    fallback = RouteDecision("least_load", "fallback", "no directory", busy, (0, 1, 2), scored.score, {})
    records: list[Record] = [decided(float(n), a_ticket(f"r{n}"), scored) for n in range(10)]
    records += [decided(10.0, a_ticket("r10"), fallback)]
    records += [Measured(11.0, f"r{n}", scored.replica_id, 0, 0.25) for n in range(2)]
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(map(to_line, records)) + b"torn")
    return path


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_one_policy_as_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_decisions.run(log, "affinity", True)
    found = told(capsys)
    (run,) = found["runs"]
    assert (run["policy"], run["decisions"], run["changed"], run["equal"], run["fallbacks"]) == (
        "affinity",
        10,
        10,
        0,
        1,
    )
    assert run["prompt_tokens"] == 10 * PROMPT_TOKENS
    assert (run["recorded"]["predicted_tokens"], run["replayed"]["predicted_tokens"]) == (0, 1600)
    assert run["replayed"]["ttft_mean_s"] > run["recorded"]["ttft_mean_s"]
    assert found["measured"] == {"requests": 2, "predicted_tokens": 0, "cached_tokens": 0, "ttft_mean_s": 0.25}
    assert (found["malformed_lines"], found["log"]) == (1, str(log))


def test_all_policies_as_a_table(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_decisions.run(log, "all", False)
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines[2 : 2 + len(POLICIES)]}
    assert rows.keys() == POLICIES.keys()
    assert rows["affinity"][1:6] == ["10", "10", "0", "1,600", "0"]
    assert rows["cost"][2] in map(str, range(11))
    assert "left out: 1 fallback, 1 line without a record" in lines
    assert any(line.startswith("measured: of 0 tokens predicted for 2 requests 0 were cached; first") for line in lines)
    assert max(map(len, lines)) <= 120


def test_options_are_those_of_the_router(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for settings in (["prefill_tokens_per_s=50"], ["router.prefill_tokens_per_s=50", "tie_s=0"]):
        replay_decisions.run(log, "cost", True, settings)
        assert told(capsys)["runs"][0]["decisions"] == 10
    with pytest.raises(UsageError, match=r"router\.speed"):
        replay_decisions.run(log, "cost", True, ["speed=1"])
    with pytest.raises(UsageError, match=r"router\.tie_s"):
        replay_decisions.run(log, "cost", True, ["tie_s=long"])


def test_an_option_changes_the_outcome(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_decisions.run(log, "cost", True, ["recompute_weight=100"])
    assert told(capsys)["runs"][0]["replayed"]["predicted_tokens"] == 1600


def test_several_policies_each_once(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_decisions.run(log, "affinity, cost,affinity", True)
    assert [run["policy"] for run in told(capsys)["runs"]] == ["affinity", "cost"]
    replay_decisions.run(log, "cost,all", True)
    assert [run["policy"] for run in told(capsys)["runs"]] == ["cost", *(name for name in POLICIES if name != "cost")]


def test_every_column_is_explained(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_decisions.run(log, "cost", False)
    said = capsys.readouterr().out
    head, _, legend = said.partition("\n\n")
    for name in set(head.splitlines()[0].split()) - {"POLICY", "DECISIONS", "WAS"}:
        assert any(line.startswith(f"{name} ") for line in legend.splitlines()), name
    assert "WAS" in legend
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize(
    "setting", ["router.policy=affinity", "policy=affinity", "decision_log=x", "engine.max_running=8"]
)
def test_an_option_without_effect_is_refused(log: Path, setting: str) -> None:
    with pytest.raises(UsageError, match=r"--set \S+ (has no effect|is no option of the router)"):
        replay_decisions.run(log, "cost", True, [setting])


def test_lines_with_impossible_values_are_counted_and_change_nothing(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay_decisions.run(log, "all", True)
    before = told(capsys)
    first = json.loads(log.read_bytes().splitlines()[0])
    log.write_bytes(log.read_bytes() + b"\n")
    with log.open("a") as file:
        for changes in ({"prompt_tokens": 10**30}, {"reuse_share": float("inf")}, {"output_tokens": 10**25}):
            file.write(json.dumps(first | changes) + "\n")
    replay_decisions.run(log, "all", True)
    after = told(capsys)
    assert after["malformed_lines"] == before["malformed_lines"] + 3
    assert after["runs"] == before["runs"]


def test_an_unknown_policy(log: Path) -> None:
    with pytest.raises(UsageError, match=r"--policy fastest is no routing policy: choose from all, .*cost"):
        replay_decisions.run(log, "fastest", True)


def test_no_log(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no decision log .*router\.decision_log"):
        replay_decisions.run(tmp_path / "nothing.jsonl", "cost", True)


@pytest.mark.parametrize("content", [b"", b"text\nof another kind\n", to_line(Measured(1.0, "r", "a", 0, None))])
def test_a_file_without_decisions(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="holds no decision"):
        replay_decisions.run(path, "cost", True)


def test_only_fallbacks_are_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored = a_decision()
    fallback = RouteDecision("least_load", "fallback", "no directory", scored.view, (0, 1, 2), scored.score, {})
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(to_line(decided(1.0, a_ticket(), fallback)))
    replay_decisions.run(path, "cost", False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["cost", "0", "0", "0", "0", "0", "-", "-", "-", "-"]
    assert lines[3] == "left out: 1 fallback"
