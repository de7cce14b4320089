"""A run of the pool benchmark, as small as it can be: what it reports, and that it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpool
from cluster.bench import pool_run, pool_startup, pool_tidy
from cluster.bench.pool_plan import HELD_BLOCKS, LEAST_BLOCKS, Plan
from cluster.bench.pool_process import BenchFailed, Worker
from cluster.bench.pool_run import PREFIX, figures, measure, regions
from kvpool.process import start_ticks
from tests.cluster.command import Command

TINY = Plan(seconds=0.01, rounds=1, capacity_blocks=LEAST_BLOCKS, startup_blocks=16)
ROUND = {
    "pairs_per_s_1": 100.0,
    "pairs_per_s_2": 150.0,
    "flock_pairs_per_s_2": 10.0,
    "python_pool_pairs_per_s": 40.0,
    "match_us": 30.0,
    "reclaim_ms": 2.0,
    "cas_tries": 1000.0,
    "cas_retries": 1.0,
}
ASKED = (
    "pairs_per_s_1",
    "pairs_per_s_2",
    "flock_pairs_per_s_2",
    "python_pool_pairs_per_s",
    "ns_per_block",
    "match_1000_us",
    "reclaim_10000_ms",
    "cas_retry_share",
    "pairs_2_over_1",
    "over_flock",
    "over_python",
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`kvatlas bench pool` starts small regions in the directory that this returns."""

    def small(plan: Plan, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
        return measure(dataclasses.replace(plan, startup_blocks=16), directory, say)

    monkeypatch.setattr(pool_run, "measure", small)
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(kvpool, "DEFAULT_DIRECTORY", directory)
    return directory


def test_figures_are_medians_and_ratios_are_those_of_a_round() -> None:
    quick = {"pairs_per_s_1": 200.0, "pairs_per_s_2": 600.0, "cas_retries": 3.0}
    rounds = [ROUND, ROUND | quick, ROUND | {"pairs_per_s_1": 900.0}]
    found = figures(rounds)
    assert list(found) == list(ASKED)
    assert found["pairs_per_s_1"] == 200
    assert found["ns_per_block"] == pytest.approx(1e9 / 200 / 16)
    assert (found["match_1000_us"], found["reclaim_10000_ms"]) == (30, 2)
    assert found["cas_retry_share"] == pytest.approx(5 / 3000)
    assert (found["pairs_2_over_1"], found["over_flock"], found["over_python"]) == (1.5, 15, 5)
    assert figures([ROUND | {"cas_tries": 0.0, "cas_retries": 0.0}])["cas_retry_share"] == 0


def test_regions_go_on_every_path(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}of-somebody"
    other.touch()
    run = regions(tmp_path)
    name = run.__enter__()
    (tmp_path / name).touch()
    (tmp_path / f"{name}-startup.creating-1").touch()
    assert not run.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert list(tmp_path.iterdir()) == [other]


def test_what_a_killed_run_left_goes_at_the_next(tmp_path: Path) -> None:
    pool_startup.create(tmp_path, f"{PREFIX}killed", 8)  # nobody has it open
    with regions(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_one_json_object(tiny: Path, kvatlas: Command) -> None:
    done = kvatlas("bench", "pool", "--seconds", "0.02", "--rounds", "2", "--capacity-blocks", "12000", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    for name in ASKED:
        assert math.isfinite(told[name]), name
        assert told[name] > 0 or name == "cas_retry_share"
    assert 0 <= told["cas_retry_share"] < 1
    ratios = [one["pairs_per_s_2"] / one["pairs_per_s_1"] for one in told["by_round"]]
    assert told["pairs_2_over_1"] == pytest.approx(sum(ratios) / 2)
    assert (told["capacity_blocks"], told["seconds"], told["rounds"]) == (12000, 0.02, 2)
    assert len(told["by_round"]) == 2
    assert len(told["cores"]) == 2
    assert set(told["machine"]) == {"cpus", "cpu_model"}
    assert told["startup"]["create_s"] > 0
    assert told["startup"]["attach_s"] > 0
    assert list(told["tidy"]) == list(pool_tidy.PARTS)
    assert list(tiny.iterdir()) == []


def test_tables_and_a_doubt(monkeypatch: pytest.MonkeyPatch, kvatlas: Command) -> None:
    part = {"damaged_blocks": 10, "unusable_before": 10, "unusable_after": 0, "pass_ms": 1.0}
    told = {
        **figures([ROUND]),
        "tidy": dict.fromkeys(pool_tidy.PARTS, part),
        "startup": {"skipped": "no room"},
        "load_before": 3.0,
        "cores": [0, 1],
    }
    monkeypatch.setattr(pool_run, "measure", lambda plan, directory, say: told | dataclasses.asdict(plan))
    done = kvatlas("bench", "pool", "--seconds", "0.02", "--rounds", "1")
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0].split()[:2]) == (0, ["MEASURE", "VALUE"])
    assert {line.split()[0] for line in lines if line} >= {*ASKED, *pool_tidy.PARTS}
    assert "1 x 0.02 s" in lines[-1]
    assert "CPUs" in lines[-1]
    assert "busy" in done.stderr


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_a_phase_has_an_end(kvatlas: Command, seconds: str) -> None:
    done = kvatlas("bench", "pool", "--seconds", seconds)
    assert (done.returncode, "--seconds" in done.stderr) == (2, True)


def test_no_room_for_the_large_region_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool_startup, "room_for", lambda directory, blocks: f"{directory} is full")
    assert pool_run.startup(TINY, tmp_path, "name", [], print) == {"skipped": f"{tmp_path} is full"}


def test_blocks_that_are_not_taken_back_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is measured past a fault, and nothing stays."""
    ask = Worker.ask

    def short(worker: Worker, do: str, **arguments: Any) -> dict[str, Any]:
        answer = ask(worker, do, **arguments)
        return answer | {"held_after": 1} if do == "reclaim" else answer

    monkeypatch.setattr(Worker, "ask", short)
    with pytest.raises(BenchFailed, match=f"should have held {HELD_BLOCKS} blocks.*1 are held still"):
        measure(TINY, tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(env: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    script = (
        "import pathlib, sys\n"
        "import kvpool\n"
        f"kvpool.DEFAULT_DIRECTORY = pathlib.Path({str(shm)!r})\n"
        "from cluster.cli.main import main\n"
        "sys.argv = ['kvatlas', 'bench', 'pool', '--seconds', '1000']\n"
        "main()\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
    assert bench.stderr is not None
    with bench.stderr:
        while "round 1" not in bench.stderr.readline():
            assert bench.poll() is None
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        bench.send_signal(number)
        rest = bench.stderr.read()
    assert bench.wait(30) != 0
    assert "Traceback" not in rest
    assert len(children) == 2
    assert [start_ticks(int(child)) for child in children] == [0, 0]
    assert list(shm.iterdir()) == []


def test_a_killed_run_takes_its_children_along(env: dict[str, str], tmp_path: Path) -> None:
    script = (
        "import pathlib\n"
        "from cluster.bench.pool_plan import Plan\n"
        "from cluster.bench.pool_run import measure\n"
        f"measure(Plan(seconds=1000), pathlib.Path({str(tmp_path)!r}), lambda text: print(text, flush=True))\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    with bench.stdout:
        assert "round 1" in bench.stdout.readline()
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        bench.kill()
        bench.wait()
    for child in map(int, children):
        descriptor = _pidfd(child)
        if descriptor is not None:
            os.close(descriptor)
    assert len(children) == 2


def _pidfd(process: int) -> int | None:
    """Waits until the process is gone: its descriptor becomes readable then."""
    import select

    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return None
    ready, _, _ = select.select([descriptor], [], [], 30)
    assert ready, f"process {process} lives on"
    return descriptor
