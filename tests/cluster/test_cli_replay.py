"""`kvatlas replay`: what it prints, what it draws, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.command import Command, assert_one_sentence

FIGURES = {
    "policy", "replicas", "routers", "load", "pool_tokens", "hit", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "imbalance",
    "cov", "phantom_tokens", "duplicate_prefill_tokens", "rejects", "decide_p99_us",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * (n // 4), "input_length": 1100, "output_length": 5, "hash_ids": [0, n % 3 + 1, n + 10]}
        for n in range(20)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_json_has_one_run_for_each_policy_and_load(kvatlas: Command, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    options = ["--replicas", "2", "--policy", "cost, least_load", "--load", "0.5,1", "--seeds", "2", "--jobs", "1"]
    done = kvatlas("replay", str(trace), *options, "--plot", str(picture), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told) == ["runs"]
    assert [(run["policy"], run["load"]) for run in told["runs"]] == [
        ("cost", 0.5), ("least_load", 0.5), ("cost", 1.0), ("least_load", 1.0),
    ]  # fmt: skip
    for run in told["runs"]:
        assert run.keys() >= FIGURES
        assert run["fallbacks"] == 0
        assert run["pool_tokens"] is None
    assert picture.read_text().startswith("<svg")


def test_the_table_says_how_requests_arrive(kvatlas: Command, trace: Path) -> None:
    done = kvatlas("replay", str(trace), "--replicas", "2", "--policy", "cost", "--load", "1", "--seeds", "1", "--requests", "8",
                   "--pool-tokens", "8192", "--jobs", "1", "--control", "no-sharing", "--set", "balance_weight=0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "8 requests, 2 replicas with pools of 8,192 tokens" in done.stdout
    assert "spread evenly" in done.stdout
    assert "control no-sharing" in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["TRACE", "--policy", "best"], 2, "--policy best"),
        (["TRACE", "--policy", ","], 2, "--policy"),
        (["TRACE", "--load", "1,x"], 2, "--load 1,x"),
        (["TRACE", "--load", "0"], 2, "--load 0"),
        (["TRACE", "--load", "nan"], 2, "--load nan"),
        (["TRACE", "--control", "other"], 2, "--control other"),
        (["TRACE", "--set", "tie_z=1"], 2, "tie_z"),
        (["TRACE", "--calibration", "absent.json"], 1, "absent.json"),
        (["TRACE", "--pool-tokens", "100", "--jobs", "1"], 1, "block"),
        (["absent.jsonl"], 1, "absent.jsonl"),
        ([], 2, "--decisions"),
        (["TRACE", "--decisions", "log.jsonl"], 2, "--decisions"),
        (["--decisions", "absent.jsonl"], 2, "absent.jsonl"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(
    kvatlas: Command, trace: Path, options: list[str], code: int, word: str
) -> None:
    arguments = [str(trace) if option == "TRACE" else option for option in options]
    assert_one_sentence(kvatlas("replay", *arguments), code, word)
