"""What the HTTP benchmark makes of what it measured; and, on a real cluster, a run as small as it can be."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.bench import http_report, http_run
from cluster.bench.http_cpu import PROXY, REDIS
from cluster.bench.http_load import Answer
from cluster.bench.http_plan import Plan
from cluster.bench.http_run import ECHO, OURS, Round, cpu_ms, figures
from tests.cluster.command import Command
from tests.raycluster.server_process import clean_environment, regions

KEYS = ("cpu_ms_per_request", "echo_cpu_ms_per_request", "ttft_added_ms_p50")


def answers(first_ms: float, events: int) -> list[Answer]:
    return [Answer(first_ms / 1e3, 0.4, events)] * 3


def scene() -> dict[str, list[Round]]:
    ours = [Round({"ingress": cpu, "redis": 1.0}, answers(20 + cpu, 35)) for cpu in (5.0, 11.0, 8.0)]
    echo = [Round({"ingress": cpu}, answers(18.0, 33)) for cpu in (4.0, 6.0, 9.0)]
    return {OURS: ours, ECHO: echo}


def test_figures_are_medians_over_rounds_and_the_ratio_is_of_rounds_side_by_side() -> None:
    found = figures(scene(), [0.001, 0.003, 0.2])
    assert (found["cpu_ms_per_request"], found["echo_cpu_ms_per_request"]) == (9.0, 6.0)
    assert found["cpu_ratio"] == 1.5  # of 6/4, 12/6 and 9/9
    assert found["ttft_added_ms_p50"] == pytest.approx(3.0)
    assert found["ttft_added_loaded_ms_p50"] == pytest.approx(10.0)
    assert found["cpu_ms_by_part"] == {"ingress": 8.0, "redis": 1.0}
    assert found["echo_cpu_ms_by_part"] == {"ingress": 6.0}
    assert (found["events_per_request"], found["echo_events_per_request"]) == (35, 33)


def test_what_processes_use_at_rest_is_taken_off_and_other_processes_do_not_count() -> None:
    used = {
        "kvatlas:ingress": 3.0,
        "kvatlas:engine": 2.0,
        PROXY: 1.0,
        REDIS: 0.1,
        "ray": 50.0,
        "echo:echo-ingress": 9.0,
    }
    idle = {"kvatlas:engine": 0.1, PROXY: 0.05, REDIS: 0.5}
    found = cpu_ms(OURS, used, idle, 10.0, 100)
    assert found == pytest.approx({"ingress": 30.0, "replicas": 10.0, "proxy": 5.0, "redis": 0.0})
    assert cpu_ms(ECHO, used, idle, 10.0, 100) == pytest.approx({"ingress": 90.0, "replicas": 0.0, "proxy": 5.0})


def test_every_figure_has_a_row() -> None:
    told = figures(scene(), [0.003])
    rows = {row[0].strip(): row[1:3] for row in http_report.figure_rows(told)}
    flat = {name for name in told if not name.startswith("echo_") and not name.endswith("_by_part")}
    assert set(rows) == flat | {"ingress", "redis"}
    assert rows["cpu_ms_per_request"] == ["9.00", "6.00"]
    assert rows["redis"] == ["1.00", ""]


@pytest.mark.parametrize(("busy", "doubted"), [(0.2, False), (3.2, True)])
def test_a_busy_machine_is_told_of(busy: float, doubted: bool) -> None:
    doubt = http_report.doubt({"load_before": busy})
    assert ("load average 3.2" in doubt) == doubted == bool(doubt)


def test_the_command(kvatlas: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    def measure(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
        asked.append(plan)
        say("on its way")
        return {**figures(scene(), [0.003]), "rounds": plan.rounds, "load_before": 3.2}

    monkeypatch.setattr(http_run, "measure", measure)
    given = ["--rounds", "2", "--requests", "32", "--concurrency", "4", "--tokens", "8"]
    done = kvatlas("bench", "http", *given, "--json")
    assert (done.returncode, asked[0]) == (0, Plan(rounds=2, requests=32, concurrency=4, tokens=8))
    told = json.loads(done.stdout)
    assert set(KEYS) <= set(told)
    assert (told["tokens"], told["concurrency"], set(told["machine"])) == (8, 4, {"cpus", "cpu_model"})
    assert "on its way" in done.stderr
    assert "load average 3.2" in done.stderr
    table = kvatlas("bench", "http").stdout.splitlines()
    assert asked[1] == Plan()
    assert table[0].split() == http_report.FIGURES
    assert table[-1].startswith("32 tokens 10 ms apart, 16 clients, 2 replicas, 7 rounds of 320 requests; ")


@pytest.mark.ray
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_measures_both_and_leaves_nothing(tmp_path: Path) -> None:
    before = regions()
    plan = "Plan(rounds=1, requests=48, warm_up=16, idle_s=1.0, pairs=4)"
    script = (
        "import json\n"
        "from cluster.bench.http_plan import Plan\n"
        "from cluster.bench.http_run import measure\n"
        f"print(json.dumps(measure({plan}, lambda text: None)))\n"
    )
    command = [sys.executable, "-c", script]
    environment = clean_environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(math.isfinite(told[key]) for key in KEYS)
    for parts in (told["cpu_ms_by_part"], told["echo_cpu_ms_by_part"]):
        assert all(parts[name] > 0 for name in ("ingress", "replicas", "proxy"))
    # Each takes its time from the same script: 32 tokens, 10 ms apart.
    assert min(told["whole_ms_p50"], told["echo_whole_ms_p50"]) >= 320
    assert (told["events_per_request"], told["echo_events_per_request"]) == (35, 33)
    assert regions() <= before
