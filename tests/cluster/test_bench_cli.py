"""`kvatlas bench serve` as a command: which options go together, what it prints, and that Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster import server_state
from cluster.bench import server
from kvpool.process import start_ticks
from tests.cluster.command import Command, assert_one_sentence

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "fakes" / "bench_server.py"


@pytest.fixture
def bench(kvatlas: Command) -> Command:
    """Runs `kvatlas bench serve` in this process, through the whole of `main`."""
    return lambda *arguments: kvatlas("bench", "serve", *arguments)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[object, ...]]:
    """Fakes are started in place of servers. Returns what each was asked to be."""
    asked: list[tuple[object, ...]] = []

    def serve_command(
        model: str, policy: str, replicas: int | None, pool_tokens: int | None, settings: Sequence[str]
    ) -> server.Command:
        asked.append((model, policy, replicas, pool_tokens, list(settings)))
        count = ("--replicas", str(replicas or 2))
        return lambda port: [sys.executable, str(FAKE), str(port), str(tmp_path / "notes"), "--policy", policy, *count]

    monkeypatch.setattr(server, "serve_command", serve_command)
    return asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "cost,fastest"], ["fastest", "affinity, chwbl, cost, least_load"]),
        (["--policy", " , "], ["--policy", "round_robin"]),
        (["--policy", ""], ["--policy", "round_robin"]),
        (["--replicas", "0"], ["cluster.replicas", "--replicas"]),
        (["--pool-tokens", "-1"], ["pool.tokens", "--pool-tokens"]),
        (["--set", "router.policy=fastest"], ["router.policy"]),
        (["--set", "engine.mod=exact"], ["engine.mode"]),
        (["--policy", "cost", "--set", "router.policy=affinity"], ["--set router.policy", "--policy"]),
        *((["--set", f"{path}=1"], [f"--set {path}"]) for path in server.RESERVED),
        (["--policy", "cost", "--workload", "none"], ["--workload"]),
        (["--policy", "cost", "--model", "demo"], ["--model", "--policy", "MODEL"]),
    ],
)
def test_refused_before_anything_starts(
    bench: Command, fakes: list[tuple[object, ...]], arguments: list[str], words: list[str]
) -> None:
    assert_one_sentence(bench(*arguments), 2, *words)
    assert fakes == []


@pytest.mark.parametrize(
    "arguments",
    [["demo"], ["--policy", "cost"], ["--replicas", "2"], ["--pool-tokens", "0"], ["--set", "engine.mode=exact"]],
)
def test_a_running_server_keeps_what_it_is(bench: Command, arguments: list[str]) -> None:
    option = arguments[0] if arguments[0].startswith("--") else "MODEL"
    done = bench("--url", "http://127.0.0.1:1", *arguments)
    assert_one_sentence(done, 2, "--url", option, "keeps its policy")


def test_json_over_policies(bench: Command, fakes: list[tuple[object, ...]]) -> None:
    given = ["--policy", "cost, round_robin", "--replicas", "3", "--pool-tokens", "4096", "--set", "engine.mode=exact"]
    done = bench("demo", *given, "--requests", "12", "--concurrency", "2", "--seed", "7", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert [run["policy"] for run in told["runs"]] == ["cost", "round_robin"]
    assert {(run["requests"], run["errors"], run["replicas"], run["seed"]) for run in told["runs"]} == {(12, 0, 3, 7)}
    assert all(run["replica_hit"] == run["hit"] for run in told["runs"])
    assert set(told["machine"]) == {"cpus", "cpu_model"}
    assert fakes == [("demo", policy, 3, 4096, ["engine.mode=exact"]) for policy in ("cost", "round_robin")]


def test_the_policy_of_the_configuration_is_the_default(bench: Command, fakes: list[tuple[object, ...]]) -> None:
    done = bench("--set", "router.policy=affinity", "--requests", "2", "--json")
    assert [run["policy"] for run in json.loads(done.stdout)["runs"]] == ["affinity"]
    assert fakes == [("", "affinity", None, None, ["router.policy=affinity"])]


@pytest.mark.usefixtures("fakes")
def test_a_table(bench: Command) -> None:
    done = bench("--policy", "cost,affinity", "--requests", "4", "--output-tokens", "1")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["MEASURE", "cost", "affinity"]
    assert any(line.split()[:2] == ["errors", "0"] for line in lines)
    assert "REPLICA" in done.stdout
    assert "CPUs" in lines[-1]


def test_the_running_server(bench: Command, tmp_path: Path) -> None:
    with server.serving(
        lambda port: [sys.executable, str(FAKE), str(port), str(tmp_path / "notes"), "--policy", "affinity"],
        2,
        os.environ,
        30,
    ) as running:
        port = int(running.url.rpartition(":")[2])
        state = server_state.here("127.0.0.1", port, running.url, "fake", running.admin_key)
        server_state.write(tmp_path / "run", state)
        for arguments in ([], ["--url", f"{running.url}/"]):
            done = bench("--requests", "3", *arguments, "--json")
            (run,) = json.loads(done.stdout.splitlines()[-1])["runs"]
            assert (run["policy"], run["requests"], run["replicas"]) == ("affinity", 3, 2)
            assert run["replica_hit"] == run["hit"]
        server_state.remove(tmp_path / "run", state)
        done = bench("--requests", "3", "--url", running.url, "--json")
        (run,) = json.loads(done.stdout.splitlines()[-1])["runs"]
        assert (done.returncode, run["policy"], run["errors"], run["replica_hit"]) == (0, "unknown", 0, None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_load_leaves_nothing(env: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    notes = tmp_path / "notes"
    script = (
        "import sys\n"
        "from cluster.bench import server\n"
        "from cluster.cli.main import main\n"
        f"line = [sys.executable, {str(FAKE)!r}]\n"
        f"server.serve_command = lambda *_: lambda port: [*line, str(port), {str(notes)!r}]\n"
        "sys.argv = ['kvatlas', 'bench', 'serve', '--policy', 'cost', '--requests', '1000000']\n"
        "main()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    with child.stderr:
        while "sending" not in child.stderr.readline():
            assert child.poll() is None
        time.sleep(0.3)  # into the load; any moment will do
        child.send_signal(number)
        rest = child.stderr.read()
    assert child.wait(30) != 0
    assert "Traceback" not in rest
    assert notes.read_text().splitlines()[-1] == "stopped"
    assert start_ticks(int(notes.read_text().split()[1])) == 0
