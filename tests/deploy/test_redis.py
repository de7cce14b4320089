"""The command of the Redis pod, run with the redis-server at hand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.deploy import manifest
from tests.fakes.redis_server import find_binary

pytestmark = pytest.mark.redis

PASSWORD = manifest.SECRET_VALUE
NO_RETRY = Retry(NoBackoff(), 0)


def _container() -> dict[str, Any]:
    (deployment,) = manifest.of_kind("Deployment")
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of the container, with a `redis-server` on PATH."""
    binary = find_binary()
    if binary is None:
        pytest.skip("there is no redis-server")
    (tmp_path / "redis-server").symlink_to(binary)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", **manifest.environment(_container()["env"])}


@pytest.fixture
def server(environment: dict[str, str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The pod's command on another port: its process and the port."""
    port = _free_port()
    command = [part.replace("port 6379", f"port {port}") for part in _container()["command"]]
    assert command != _container()["command"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 10
        while not _listens(port):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process, port
    finally:
        with contextlib.suppress(ProcessLookupError):  # its children too: the command is a shell's
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_takes_only_the_password_and_forgets_nothing_by_itself(server: tuple[subprocess.Popen[bytes], int]) -> None:
    _, port = server
    with redis.Redis(port=port, retry=NO_RETRY) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis.from_url(f"redis://:{PASSWORD}@127.0.0.1:{port}/0") as client:
        settings: Any = client.config_get("*")
        assert settings["maxmemory-policy"] == "noeviction"
        assert (settings["save"], settings["appendonly"]) == ("", "no")
        limit = manifest.quantity(_container()["resources"]["limits"]["memory"])
        assert 0 < int(settings["maxmemory"]) <= limit * 0.7


def test_the_password_is_in_no_list_of_processes(server: tuple[subprocess.Popen[bytes], int]) -> None:
    process, _ = server
    shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"redis-server" in shown
    assert PASSWORD.encode() not in shown


def test_it_ends_when_kubernetes_asks_it_to(server: tuple[subprocess.Popen[bytes], int]) -> None:
    process, _ = server
    process.terminate()
    assert process.wait(10) == 0


def test_without_a_password_it_does_not_start(environment: dict[str, str]) -> None:
    environment["REDISCLI_AUTH"] = ""
    done = subprocess.run(_container()["command"], env=environment, capture_output=True, check=False, timeout=10)
    assert done.returncode != 0


def test_the_probes_find_it_alive(
    server: tuple[subprocess.Popen[bytes], int], environment: dict[str, str], tmp_path: Path
) -> None:
    process, port = server
    binary = find_binary()
    assert binary is not None
    client = binary.resolve().parent / "redis-cli"
    if not client.is_file():
        pytest.skip("there is no redis-cli")
    (tmp_path / "redis-cli").write_text(f'#!/bin/sh\nexec "{client}" -p {port} "$@"\n')
    (tmp_path / "redis-cli").chmod(0o755)
    for name in ("readinessProbe", "livenessProbe"):
        command = _container()[name]["exec"]["command"]
        assert subprocess.run(command, env=environment, check=False, timeout=10).returncode == 0
        wrong = {**environment, "REDISCLI_AUTH": "wrong"}
        assert subprocess.run(command, env=wrong, check=False, timeout=10, capture_output=True).returncode != 0
    process.kill()
    process.wait()
    command = _container()["livenessProbe"]["exec"]["command"]
    assert subprocess.run(command, env=environment, check=False, timeout=10, capture_output=True).returncode != 0
