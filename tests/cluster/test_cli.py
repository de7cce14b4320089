"""The command: exit codes, where output goes, and that nothing heavy is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ports, server_state
from kvpool.process import start_ticks
from tests.cluster.command import Command, Done, assert_one_sentence


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
    for verb in ("serve", "stop", "status", "config", "bench", "directory", "pool"):
        assert verb in done.stdout


def test_a_taken_port_ends_before_anything_starts(kvatlas: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = kvatlas("serve", "--port", str(port))
    assert_one_sentence(done, 2, str(port), "--port")


def test_the_process_ends_with_the_code(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "cluster.cli.main", "serve", "--mode", "turbo"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert_one_sentence(Done(done.returncode, done.stdout, done.stderr), 2, "engine.mode")


@pytest.mark.parametrize("model", ["./nope", "/nope", "~/nope-nope", "../nope"])
def test_a_wrong_model_path_is_never_taken_for_a_hub_id(kvatlas: Command, model: str) -> None:
    done = kvatlas("serve", model, "--port", str(ports.choose("127.0.0.1", 0)))
    assert_one_sentence(done, 2, "nope", "does not exist", "config.json")


def test_bad_configuration(kvatlas: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("pool: {token: 1}")
    assert_one_sentence(kvatlas("serve", "--config", str(file)), 2, "pool.tokens")
    assert_one_sentence(kvatlas("serve", "--mode", "turbo"), 2, "engine.mode", "flag --mode", "exact, fast")
    assert_one_sentence(kvatlas("serve", "--set", "pool.tokens"), 2, "--set pool.tokens=VALUE")
    monkeypatch.setenv("KVATLAS_POL__TOKENS", "1")
    assert_one_sentence(kvatlas("config"), 2, "KVATLAS_POOL__TOKENS")


def test_config_as_json_is_the_last_line(kvatlas: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVATLAS_POOL__TOKENS", "4096")
    monkeypatch.setenv("KVATLAS_HTTP__ADMIN_KEY", "hunter2")
    done = kvatlas("config", "--json", "--set", "http.port=9")
    assert done.returncode == 0, done.stderr
    found = {row["path"]: row for row in json.loads(done.stdout.splitlines()[-1])["options"]}
    assert (found["pool.tokens"]["value"], found["pool.tokens"]["origin"]) == (4096, "env KVATLAS_POOL__TOKENS")
    assert (found["http.port"]["value"], found["http.port"]["origin"]) == (9, "flag --set")
    assert "hunter2" not in done.stdout


def test_config_as_a_table(kvatlas: Command) -> None:
    done = kvatlas("config")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == ["OPTION", "VALUE", "ORIGIN"]
    assert "\x1b" not in done.stdout


def test_nothing_runs(kvatlas: Command) -> None:
    assert_one_sentence(kvatlas("stop"), 2, "kvatlas serve")
    assert_one_sentence(kvatlas("status", "--json"), 2, "kvatlas serve")
    assert_one_sentence(kvatlas("stop", "--port", "7"), 2, "port 7")
    assert_one_sentence(kvatlas("bench", "serve", "--json"), 2, "kvatlas serve")
    assert_one_sentence(kvatlas("directory", "check", "--json"), 2, "kvatlas serve")


def test_nothing_answers(kvatlas: Command) -> None:
    url = f"http://127.0.0.1:{ports.choose('127.0.0.1', 0)}"
    assert_one_sentence(kvatlas("status", "--url", url), 1, url)
    told = kvatlas("status", "--url", url, "--json")
    assert told.returncode == 1
    assert not json.loads(told.stdout)["ready"]
    assert url in json.loads(told.stdout)["problem"]
    assert_one_sentence(kvatlas("bench", "serve", "--url", url, "--requests", "1"), 1, url)
    assert_one_sentence(kvatlas("status", "--url", "localhost"), 2, "http://")


def test_status_of_a_server_that_is_starting(kvatlas: Command) -> None:
    state = server_state.here("127.0.0.1", 1234, "http://127.0.0.1:1234", "demo", "key")
    server_state.write(Path(os.environ["KVATLAS_RUNTIME_DIR"]), state)
    done = kvatlas("status", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problem"].startswith("starting for ")
    assert f"process {os.getpid()}" in kvatlas("status").stdout


def test_stop_ends_the_process_of_the_state_file_and_no_other(kvatlas: Command) -> None:
    directory = Path(os.environ["KVATLAS_RUNTIME_DIR"])
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        ticks = start_ticks(child.pid)
        state = server_state.ServerState(child.pid, ticks - 1, "h", 1234, "u", "", "m", 0.0)
        server_state.write(directory, state)
        assert_one_sentence(kvatlas("stop"), 2, "kvatlas serve")
        assert child.poll() is None
        server_state.write(directory, server_state.ServerState(child.pid, ticks, "h", 1234, "u", "", "m", 0.0))
        done = kvatlas("stop", "--json")
        assert json.loads(done.stdout.splitlines()[-1])["pid"] == child.pid
        assert child.wait(10) == -15
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_several_servers_need_a_choice(kvatlas: Command) -> None:
    directory = Path(os.environ["KVATLAS_RUNTIME_DIR"])
    for port in (1, 2):
        server_state.write(directory, server_state.here("h", port, "u", "m", ""))
    assert_one_sentence(kvatlas("stop"), 2, "1, 2", "--port")
