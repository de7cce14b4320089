"""`kvatlas serve` as a person runs it: ready block, status, the printed lines, stop; and what a replica refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoConfig

from cluster import ports
from tests.raycluster.server_process import Server, clean_environment, regions

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return clean_environment(tmp_path)


@pytest.fixture
def server(env: dict[str, str], tiny_model_dir: Path) -> Iterator[Server]:
    port = str(ports.choose("127.0.0.1", 0))
    started = Server(env, str(tiny_model_dir), "--port", port, "--pool-tokens", "4096", "--threads", "1")
    yield started
    started.close()


def kvatlas(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def run_prefix_line(line: str) -> dict[str, str]:
    """The headers that the printed line with the long prompt shows; the body must be there too."""
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, timeout=60)
    assert "cached_tokens" in done.stdout, done.stdout
    return dict(shown.split(": ", 1) for shown in done.stdout.splitlines() if shown.startswith("x-"))


def test_from_serve_to_stop(env: dict[str, str], server: Server) -> None:
    before = regions()
    server.wait_for("Stop with Ctrl-C")
    assert "256 blocks of 16 tokens = 4,096 tokens" in server.text
    assert "Traceback" not in server.text

    report = json.loads(kvatlas(env, "status", "--json").stdout.splitlines()[-1])
    assert report["ready"]
    assert report["replicas"][0]["capacity_blocks"] == 256
    shown = kvatlas(env, "status")
    assert shown.returncode == 0
    assert report["replicas"][0]["replica_id"] in shown.stdout

    asked = [line.strip() for line in server.lines if line.strip().startswith("curl ")]
    assert len(asked) == 2
    once = subprocess.run(["sh", "-c", asked[0]], capture_output=True, text=True, check=True, timeout=60)
    assert "choices" in json.loads(once.stdout)
    twice = [run_prefix_line(asked[1]) for _ in range(2)]
    assert twice[0]["x-kvatlas-replica"] == twice[1]["x-kvatlas-replica"]
    assert twice[0]["x-kvatlas-cached-tokens"] == "0"
    assert int(twice[1]["x-kvatlas-cached-tokens"]) > 0
    assert "outcome=prefix_hit" in twice[1]["x-kvatlas-route"]

    bench = kvatlas(env, "bench", "serve", "--requests", "4", "--concurrency", "2", "--output-tokens", "2", "--json")
    (measured,) = json.loads(bench.stdout.splitlines()[-1])["runs"]
    assert measured["requests"] == 4
    assert bench.returncode == (1 if measured["errors"] else 0)
    assert measured["errors"] or measured["replica_hit"] == measured["hit"]

    began = time.monotonic()
    stopped = kvatlas(env, "stop", "--json")
    assert json.loads(stopped.stdout.splitlines()[-1])["stopped"]
    assert server.wait(30) == 0
    assert time.monotonic() - began < 30
    assert server.lines[-1] == "Stopped."
    assert "Traceback" not in server.text
    assert "raylet" not in server.text
    assert regions() <= before
    assert kvatlas(env, "status").returncode == 2


@pytest.mark.parametrize("words", ["ray", "Ask something"], ids=["while starting", "when ready"])
def test_ctrl_c_is_clean(server: Server, words: str) -> None:
    before = regions()
    server.wait_for(words)
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait(60) == 0
    assert "Traceback" not in server.text
    assert server.lines[-1] == "Stopped."
    assert regions() <= before


def test_an_answer_in_progress_is_finished_before_a_stop(server: Server) -> None:
    server.wait_for("Stop with Ctrl-C")
    url = next(line.split()[-1] for line in server.lines if line.strip().startswith("API")).removesuffix("/v1")
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        assert "error" not in first
        os.killpg(server.process.pid, signal.SIGINT)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
    assert server.wait(60) == 0


def test_a_model_that_is_refused_ends_with_the_reason(
    env: dict[str, str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tmp_path / "dynamic"
    model.mkdir()
    for file in tiny_model_dir.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    config.save_pretrained(model)
    refused = Server(env, str(model), "--port", str(ports.choose("127.0.0.1", 0)))
    try:
        assert refused.wait(200) == 2
        assert refused.lines[-1].startswith("kvatlas: ")
        assert "dynamic" in refused.lines[-1]
        assert "Traceback" not in refused.text
    finally:
        refused.close()


def test_a_pool_larger_than_the_shared_memory_ends_with_both_sizes(env: dict[str, str], tiny_model_dir: Path) -> None:
    refused = Server(env, str(tiny_model_dir), "--port", str(ports.choose("127.0.0.1", 0)), "--pool-tokens", str(10**9))
    try:
        assert refused.wait(200) == 2
        assert "pool.tokens" in refused.lines[-1]
        assert "MiB" in refused.lines[-1]
    finally:
        refused.close()
