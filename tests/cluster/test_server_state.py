"""State files: found, private, and never trusted about a process that is gone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import server_state
from cluster.errors import UsageError
from cluster.server_state import ServerState, here, running, runtime_dir
from kvpool.process import start_ticks


def mine(port: int = 8000) -> ServerState:
    return here("127.0.0.1", port, f"http://127.0.0.1:{port}", "demo", "key")


def test_written_state_is_found_and_private(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    file = server_state.write(directory, mine())
    assert running(directory) == [server_state._read(file)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [path.name for path in directory.iterdir()] == ["serve-8000.json"]


def test_the_key_is_not_in_the_repr() -> None:
    assert "'key'" not in repr(mine())


def test_several_servers_are_ordered_by_port(tmp_path: Path) -> None:
    for port in (9000, 800, 8000):
        server_state.write(tmp_path, mine(port))
    assert [state.port for state in running(tmp_path)] == [800, 8000, 9000]


def test_a_dead_process_is_forgotten(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks > 0
    server_state.write(tmp_path, replace(mine(), pid=child.pid, start_ticks=ticks))
    assert len(running(tmp_path)) == 1
    child.communicate(b"\n")
    assert running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_is_not_alive() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child) == 0
    os.waitpid(child, 0)


def test_a_reused_process_id_is_not_ours(tmp_path: Path) -> None:
    server_state.write(tmp_path, replace(mine(), start_ticks=mine().start_ticks - 1))
    assert running(tmp_path) == []


def test_garbage_is_removed_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "serve-1.json").write_text("{")
    (tmp_path / "serve-2.json").write_text('{"pid": 1}')
    assert running(tmp_path) == []


def test_remove_leaves_another_servers_file(tmp_path: Path) -> None:
    other = replace(mine(), pid=1, start_ticks=1)
    server_state.write(tmp_path, mine())
    server_state.remove(tmp_path, other)
    assert len(running(tmp_path)) == 1
    server_state.remove(tmp_path, replace(mine(), metrics_url="changed"))
    assert running(tmp_path) == []
    server_state.remove(tmp_path, mine())


def test_where_the_files_are() -> None:
    assert runtime_dir({"KVATLAS_RUNTIME_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}) == Path("/a")
    assert runtime_dir({"XDG_RUNTIME_DIR": "/b"}) == Path("/b/kvatlas")
    assert str(os.getuid()) in runtime_dir({}).name


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(UsageError, match="KVATLAS_RUNTIME_DIR"):
        server_state.write(open_to_all, server_state.here("127.0.0.1", 1, "http://x", "m", ""))
