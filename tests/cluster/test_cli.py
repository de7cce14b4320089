"""The command from outside, as a process: exit codes, where output goes, and that nothing heavy is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ports, server_state

ROOT = Path(__file__).parents[2]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with no settings of the machine's, and a runtime directory of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVATLAS_", "RAY_", "XDG_"))}
    return kept | {"KVATLAS_RUNTIME_DIR": str(tmp_path / "run"), "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def kvatlas(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def assert_one_sentence(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvatlas: ")
    for word in words:
        assert word in lines[0]
    assert "\x1b" not in done.stderr


def test_help_imports_nothing_heavy(env: dict[str, str]) -> None:
    script = (
        "import sys; sys.argv = ['kvatlas', '--help']\n"
        "import cluster.cli.main as m\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'ray', 'torch', 'transformers', 'numba', 'httpx', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for verb in ("serve", "stop", "status", "config", "bench"):
        assert verb in done.stdout


def test_a_taken_port_ends_before_anything_starts(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = kvatlas(env, "serve", "--port", str(port))
    assert_one_sentence(done, 2, str(port), "--port")


@pytest.mark.parametrize("model", ["./nope", "/nope", "~/nope-nope", "../nope"])
def test_a_wrong_model_path_is_never_taken_for_a_hub_id(env: dict[str, str], model: str) -> None:
    done = kvatlas(env, "serve", model, "--port", str(ports.choose("127.0.0.1", 0)))
    assert_one_sentence(done, 2, "nope", "does not exist", "config.json")


def test_bad_configuration(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("pool: {token: 1}")
    assert_one_sentence(kvatlas(env, "serve", "--config", str(file)), 2, "pool.tokens")
    assert_one_sentence(kvatlas(env, "serve", "--mode", "turbo"), 2, "engine.mode", "flag --mode", "exact, fast")
    assert_one_sentence(kvatlas(env, "serve", "--set", "pool.tokens"), 2, "--set pool.tokens=VALUE")
    assert_one_sentence(kvatlas(env | {"KVATLAS_POL__TOKENS": "1"}, "config"), 2, "KVATLAS_POOL__TOKENS")


def test_config_as_json_is_the_last_line(env: dict[str, str]) -> None:
    env |= {"KVATLAS_POOL__TOKENS": "4096", "KVATLAS_HTTP__ADMIN_KEY": "hunter2"}
    done = kvatlas(env, "config", "--json", "--set", "http.port=9")
    assert done.returncode == 0, done.stderr
    found = {row["path"]: row for row in json.loads(done.stdout.splitlines()[-1])["options"]}
    assert (found["pool.tokens"]["value"], found["pool.tokens"]["origin"]) == (4096, "env KVATLAS_POOL__TOKENS")
    assert (found["http.port"]["value"], found["http.port"]["origin"]) == (9, "flag --set")
    assert "hunter2" not in done.stdout


def test_config_as_a_table(env: dict[str, str]) -> None:
    done = kvatlas(env, "config")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == ["OPTION", "VALUE", "ORIGIN"]
    assert "\x1b" not in done.stdout


def test_nothing_runs(env: dict[str, str]) -> None:
    assert_one_sentence(kvatlas(env, "stop"), 2, "kvatlas serve")
    assert_one_sentence(kvatlas(env, "status", "--json"), 2, "kvatlas serve")
    assert_one_sentence(kvatlas(env, "stop", "--port", "7"), 2, "port 7")
    assert_one_sentence(kvatlas(env, "bench", "serve", "--json"), 2, "kvatlas serve")


def test_nothing_answers(env: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{ports.choose('127.0.0.1', 0)}"
    assert_one_sentence(kvatlas(env, "status", "--url", url), 1, url)
    assert_one_sentence(kvatlas(env, "bench", "serve", "--url", url, "--requests", "1"), 1, url)
    assert_one_sentence(kvatlas(env, "status", "--url", "localhost"), 2, "http://")


def test_stop_ends_the_process_of_the_state_file_and_no_other(env: dict[str, str]) -> None:
    directory = Path(env["KVATLAS_RUNTIME_DIR"])
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        ticks = server_state.start_ticks(child.pid)
        state = server_state.ServerState(child.pid, ticks - 1, "h", 1234, "u", "", "m", 0.0)
        server_state.write(directory, state)
        assert_one_sentence(kvatlas(env, "stop"), 2, "kvatlas serve")
        assert child.poll() is None
        server_state.write(directory, server_state.ServerState(child.pid, ticks, "h", 1234, "u", "", "m", 0.0))
        done = kvatlas(env, "stop", "--json")
        assert json.loads(done.stdout.splitlines()[-1])["pid"] == child.pid
        assert child.wait(10) == -15
    finally:
        child.kill()
        child.wait()
        child.stdout and child.stdout.close()


def test_several_servers_need_a_choice(env: dict[str, str]) -> None:
    directory = Path(env["KVATLAS_RUNTIME_DIR"])
    for port in (1, 2):
        server_state.write(directory, server_state.here("h", port, "u", "m", ""))
    assert_one_sentence(kvatlas(env, "stop"), 2, "1, 2", "--port")
