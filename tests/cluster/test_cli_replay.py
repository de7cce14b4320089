"""`kvatlas replay`: what it prints, what it draws, what it refuses."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from cluster.cli import replay
from router.policy import POLICIES
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


def test_what_is_printed_is_explained_and_fits_120_columns(kvatlas: Command, trace: Path) -> None:
    done = kvatlas(
        "replay", str(trace), "--replicas", "1", "--policy", "all, cost", "--load", "1", "--seeds", "1", "--jobs", "1"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.split()[1] for line in lines[2 : 2 + len(POLICIES)]] == list(POLICIES), "each once"
    for name in ("HIT", "TTFT", "IMBALANCE", "COV", "PHANTOM", "DUPLICATE", "REJECTS", "DECIDE P99"):
        assert any(re.search(rf"(^|  ){name} +\S", line) for line in lines[2 + len(POLICIES) :]), name
    assert "1 replica with a pool that keeps everything, 1 router," in done.stdout
    assert "one seed" in done.stdout
    assert not re.search(r"\b1 \w+s\b", done.stdout.partition("\n\n")[2].partition("\n\n")[0].replace("1 is ", ""))


@pytest.mark.parametrize("options", [[], ["--json"], ["--plot", "PLOT"]])
def test_a_pool_without_room_for_any_request_has_no_times(
    kvatlas: Command, trace: Path, tmp_path: Path, options: list[str]
) -> None:
    given = [str(tmp_path / "plot.svg") if option == "PLOT" else option for option in options]
    sizes = [
        "--replicas",
        "2",
        "--policy",
        "cost",
        "--load",
        "1",
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--pool-tokens",
        "1024",
    ]
    done = kvatlas("replay", str(trace), *sizes, *given)
    assert done.returncode == 0, done.stderr
    assert "P95 TTFT -\n" in done.stderr
    assert "no request fits into a pool of 1,024 tokens; give more --pool-tokens" in done.stderr
    if "--json" in options:
        assert json.loads(done.stdout)["runs"][0]["ttft_p95_s"] is None
    else:
        assert re.search(r"0\.000 +- +- +- ", done.stdout)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["TRACE", "--policy", "best"], "--policy best"),
        (["TRACE", "--policy", "all,best"], "--policy best"),
        (["TRACE", "--policy", ","], "--policy"),
        (["TRACE", "--load", "1,x"], "--load 1,x"),
        (["TRACE", "--load", "0"], "--load 0"),
        (["TRACE", "--load", "nan"], "--load nan"),
        (["TRACE", "--load", "1e-9"], "--load"),
        (["TRACE", "--control", "other"], "--control other"),
        (["TRACE", "--set", "tie_z=1"], "tie_z"),
        (["TRACE", "--set", "engine.max_running=8"], "--set engine.max_running is no option of the router"),
        (["TRACE", "--set", "router.policy=cost"], "--policy"),
        (["TRACE", "--set", "policy=cost"], "--policy"),
        (["TRACE", "--set", "decision_log=x"], "decision_log has no effect"),
        (["TRACE", "--set", "router.prefill_tokens_per_s=5"], "--calibration"),
        (["TRACE", "--set", "decode_interference_s=5"], "--calibration"),
        (["TRACE", "--set", "claim_tokens=5"], "claim_tokens has no effect"),
        (["TRACE", "--calibration", "absent.json"], "absent.json"),
        (["TRACE", "--pool-tokens", "100", "--jobs", "1"], "--pool-tokens"),
        (["TRACE", "--seed", "1"], "--seed has no effect without --tokenizer"),
        (["TRACE", "--block-tokens", "8"], "--block-tokens has no effect without --tokenizer"),
        (["TRACE", "--output-tokens", "8"], "--output-tokens has no effect without --tokenizer"),
        (["absent.jsonl"], "absent.jsonl"),
        (["/"], "cannot be read"),
        ([], "--decisions"),
        (["TRACE", "--decisions", "log.jsonl"], "--decisions"),
        (["--decisions", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(
    kvatlas: Command, trace: Path, options: list[str], word: str
) -> None:
    arguments = [str(trace) if option == "TRACE" else option for option in options]
    done = kvatlas("replay", *arguments)
    assert_one_sentence(done, 2, word)
    assert not re.search(r"\b[A-Z][a-z]+Error\b", done.stderr), "no words of Python"


@pytest.mark.parametrize(
    "options",
    [
        *(["--" + name, value] for name in ("lag-ms", "rate-error") for value in ("inf", "nan", "-1", "1e300")),
        *(
            ["--" + name, value]
            for name in ("replicas", "routers", "seeds", "jobs", "requests")
            for value in ("0", "1" + "0" * 30)
        ),
    ],
)
def test_numbers_that_nothing_can_be_made_of_are_refused(kvatlas: Command, trace: Path, options: list[str]) -> None:
    done = kvatlas("replay", str(trace), *options)
    assert done.returncode == 2
    assert options[0] in done.stderr
    assert "Traceback" not in done.stderr


NOT_OF_DECISIONS = {
    "replicas": "2", "routers": "2", "pool-tokens": "99", "load": "1", "lag-ms": "50", "seeds": "3", "control": "none",
    "requests": "5", "calibration": "c.json", "rate-error": "2", "tokenizer": "dir", "block-tokens": "16",
    "output-tokens": "16", "jobs": "1", "plot": "p.svg",
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_OF_DECISIONS)
def test_with_decisions_what_has_no_effect_is_refused_even_at_its_default(kvatlas: Command, name: str) -> None:
    done = kvatlas("replay", "--decisions", "log.jsonl", f"--{name}", NOT_OF_DECISIONS[name])
    assert_one_sentence(done, 2, f"--{name} has no effect with --decisions")


def test_each_option_of_the_command_goes_with_decisions_or_is_refused() -> None:
    names = set(inspect.signature(replay.replay).parameters) - {"context", "trace"}
    assert names - replay.OF_DECISIONS == {name.replace("-", "_") for name in NOT_OF_DECISIONS}


def test_help_names_an_option_that_is_taken(kvatlas: Command, trace: Path) -> None:
    said = kvatlas("replay", "--help").stdout
    (example,) = set(re.findall(r"\w+=\d+", said))
    sizes = ["--replicas", "2", "--policy", "cost", "--load", "1", "--seeds", "1", "--jobs", "1", "--requests", "3"]
    assert kvatlas("replay", str(trace), *sizes, "--set", example).returncode == 0
