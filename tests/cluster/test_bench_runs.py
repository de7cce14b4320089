"""Runs over several policies, end to end over a small script that stands in for the server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import ports
from cluster.bench.report import doubt
from cluster.bench.runs import Target, Work, measure, measure_policies
from cluster.bench.server import Command
from cluster.errors import ServeFailed
from kvpool.process import start_ticks

FAKE = Path(__file__).parents[1] / "fakes" / "bench_server.py"
# Two replicas take turns at these: each meets both prefixes, so each computes both once.
PROMPTS = [f"{letter * 64} and {index}" for index in range(4) for letter in "aabb"]
WORK = Work(PROMPTS, "letters", concurrency=1, output_tokens=1, seed=5)


class Rig:
    """Runs `policies` on fakes started with `options`; `said` is the progress, `notes` what the fakes wrote."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.said: list[str] = []

    def run(self, *policies: str, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        def command(policy: str) -> Command:
            return lambda port: [sys.executable, str(FAKE), str(port), str(self.notes), "--policy", policy, *options]

        return list(measure_policies(policies, command, 2, WORK, self.said.append, 30))

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.notes.read_text().splitlines() if line.startswith("pid ")]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "notes")


def test_every_policy_gets_a_fresh_server(rig: Rig) -> None:
    runs = rig.run("cost", "round_robin")
    assert [run["policy"] for run in runs] == ["cost", "round_robin"]
    assert len(set(rig.pids())) == 2
    assert not any(start_ticks(pid) for pid in rig.pids())
    lines = [line for line in rig.notes.read_text().splitlines() if not line.startswith("pid")]
    assert lines == ["policy cost", "SIGTERM", "stopped", "policy round_robin", "SIGTERM", "stopped"]
    for run in runs:
        assert run["cached_blocks_at_start"] == 0
        # 64 characters of each prefix are cached for all but the first prompt with it at each replica.
        assert run["cached_tokens"] == 64 * (len(PROMPTS) - 4)
    assert runs[0]["cached_tokens"] == runs[1]["cached_tokens"]
    assert [text.partition(":")[0] for text in rig.said] == ["cost"] * 3 + ["round_robin"] * 3


def test_the_report(rig: Rig) -> None:
    (run,) = rig.run("affinity")
    prompt_tokens = sum(map(len, PROMPTS))
    cached = 64 * (len(PROMPTS) - 4)
    told = {
        "policy": "affinity",
        "requests": len(PROMPTS),
        "errors": 0,
        "first_errors": [],
        "hit": round(cached / prompt_tokens, 4),
        "replica_hit": run["hit"],
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached,
        "completion_tokens": len(PROMPTS),
        "replica_queried_tokens": prompt_tokens,
        "replica_hit_tokens": cached,
        "queried_tokens": prompt_tokens,
        "predicted_tokens": cached,
        "measured_tokens": cached,
        "phantom_tokens": 0,
        "retries": 0,
        "decisions": {"prefix": len(PROMPTS)},
        "replicas": 2,
        "pool_tokens": 1024,
        "cached_blocks_at_start": 0,
        "model": "fake",
        "workload": "letters",
        "concurrency": 1,
        "output_tokens": 1,
        "seed": 5,
        "by_replica": [
            {
                "replica_id": f"r{index}",
                "requests": len(PROMPTS) // 2,
                "cached_tokens": cached // 2,
                "prompt_tokens": prompt_tokens // 2,
            }
            for index in range(2)
        ],
    }
    timed = {"seconds", "rps", "ttft_p50_s", "ttft_p95_s", "total_p50_s", "total_p95_s", "out_tok_s"}
    assert {name: value for name, value in run.items() if name not in timed} == told
    assert timed < run.keys()
    assert all(run[name] > 0 for name in timed)
    assert doubt(run) == ""


def test_replicas_that_count_otherwise_are_doubted(rig: Rig) -> None:
    (run,) = rig.run("cost", options=("--miscount", "1"))
    assert run["replica_hit_tokens"] == run["cached_tokens"] + len(PROMPTS)
    assert "cost: the replicas counted" in doubt(run)


def test_failed_requests_are_figures(rig: Rig) -> None:
    (run,) = rig.run("cost", options=("--fail", "errors"))
    assert run["errors"] == len(PROMPTS) // 2
    assert "HTTP 503" in run["first_errors"][0]
    assert sum(entry["requests"] for entry in run["by_replica"]) == len(PROMPTS) // 2
    assert doubt(run) == ""


def test_a_server_without_a_router_is_measured_too(rig: Rig) -> None:
    (run,) = rig.run("cost", options=("--no-routing",))
    assert run["policy"] == "cost"
    assert run["predicted_tokens"] is None
    assert run["decisions"] == {}
    assert run["replica_hit"] == run["hit"]


def test_a_server_that_routes_otherwise_is_no_measurement(rig: Rig) -> None:
    with pytest.raises(ServeFailed, match="routes by cost although affinity"):
        rig.run("affinity", options=("--policy", "cost"))
    assert not any(start_ticks(pid) for pid in rig.pids())


def test_a_server_that_dies_under_load_is_no_measurement(rig: Rig) -> None:
    with pytest.raises(ServeFailed, match="while it was measured"):
        rig.run("cost", options=("--fail", "leave"))


def test_nothing_to_measure() -> None:
    url = f"http://127.0.0.1:{ports.choose('127.0.0.1', 0)}"
    with pytest.raises(ServeFailed, match=f"kvatlas status --url {url}"):
        measure(Target(url), WORK)


def test_a_target_does_not_show_its_key() -> None:
    assert "secret" not in repr(Target("u", "secret"))
