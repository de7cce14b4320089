"""A server of the benchmark's own: its command line, and that it is stopped on every path. A small script stands in for it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import http_client
from cluster.bench.server import DIRECTORY_S, RESERVED, Command, Server, serve_command, serving
from cluster.errors import ServeFailed
from kvpool.process import start_ticks

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "fakes" / "bench_server.py"


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    """Where the fake writes what happened to it. Ends the fake if the test did not."""
    file = tmp_path / "notes"
    yield file
    if file.exists() and start_ticks(pid(file)):
        os.kill(pid(file), signal.SIGKILL)


def pid(notes: Path) -> int:
    return int(notes.read_text().split()[1])


def gone(notes: Path) -> bool:
    return start_ticks(pid(notes)) == 0


def fake(notes: Path, *options: str) -> Command:
    return lambda port: [sys.executable, str(FAKE), str(port), str(notes), *options]


def test_the_command_line() -> None:
    line = serve_command("m", "affinity", 3, 12000, ["engine.mode=exact"])(8123)
    assert line[:5] == [sys.executable, "-m", "cluster.cli.main", "serve", "m"]
    text = " ".join(line)
    for words in ("--port 8123", "--host 127.0.0.1", "--replicas 3", "--pool-tokens 12000", "--set engine.mode=exact"):
        assert words in text
    assert text.index("--set engine.mode=exact") < text.index("--set router.policy=affinity")
    own = {line[i + 1].partition("=")[0] for i, word in enumerate(line) if word == "--set"}
    assert own - {"engine.mode", "router.policy"} <= set(RESERVED)
    assert line != serve_command("m", "affinity", 3, 12000, ["engine.mode=exact"])(8123), "a cluster id is used once"


def test_what_is_not_given_is_left_to_the_configuration() -> None:
    line = serve_command("", "cost", None, None, [])(1)
    assert line[4] == "--host"
    assert not {"--replicas", "--pool-tokens"} & set(line)


def test_ready_then_stopped(notes: Path) -> None:
    env = dict(os.environ) | {"KVATLAS_HTTP__ADMIN_KEY": "the person's", "KVATLAS_RUNTIME_DIR": "elsewhere"}
    with serving(fake(notes), 2, env, 30) as server:
        assert http_client.get(f"{server.url}/debug/state", 5, "the person's").status == 404
        assert http_client.get(f"{server.url}/debug/state", 5, server.admin_key).status == 200
        child = Path(f"/proc/{pid(notes)}")
        assert server.admin_key not in child.joinpath("cmdline").read_text()
        assert server.admin_key not in repr(server)
        seen = dict(pair.split("=", 1) for pair in child.joinpath("environ").read_text().split("\0") if "=" in pair)
        private = Path(seen["KVATLAS_RUNTIME_DIR"])
        assert private.parent.stat().st_mode & 0o077 == 0
        assert notes.read_text().split()[3] == str(pid(notes)), "it leads a session of its own"
    assert notes.read_text().splitlines()[-1] == "stopped"
    assert gone(notes)
    assert not private.parent.exists()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ServeFailed, ValueError])
def test_stopped_when_the_measurement_fails(notes: Path, raised: type[BaseException]) -> None:
    with pytest.raises(raised), serving(fake(notes), 2, os.environ, 30):
        raise raised
    assert notes.read_text().splitlines()[-1] == "stopped"
    assert gone(notes)


def test_too_few_replicas_is_not_ready(notes: Path, tmp_path: Path) -> None:
    server = Server(fake(notes), os.environ, tmp_path)
    server.start()
    try:
        server.wait_ready(2, 30)
        with pytest.raises(ServeFailed, match=r"start_timeout_s(.|\n)*starting \*\*\*"):
            server.wait_ready(3, 0)
    finally:
        server.stop()
    assert gone(notes)


def test_the_router_has_a_while_to_hear_of_the_replicas(notes: Path, tmp_path: Path) -> None:
    server = Server(fake(notes, "--silent", "2"), os.environ, tmp_path)
    server.start()
    try:
        server.wait_ready(2, 30)
        assert http_client.get(f"{server.url}/debug/state", 5, server.admin_key).body["routing"]["asked"] == 4
    finally:
        server.stop()


def test_a_directory_that_stays_silent_is_no_obstacle(notes: Path, tmp_path: Path) -> None:
    server = Server(fake(notes, "--silent", "1000000"), os.environ, tmp_path)
    server.start()
    now = itertools.count(step=DIRECTORY_S)
    try:
        server.wait_ready(2, 1e9, clock=lambda: float(next(now)))
    finally:
        server.stop()


def test_a_refusal_is_passed_on_in_one_sentence(notes: Path) -> None:
    with pytest.raises(ServeFailed) as error, serving(fake(notes, "--fail", "refuse"), 2, os.environ, 30):
        pytest.fail("it is not ready")
    assert str(error.value) == "The server to measure ended before it was ready: pool.tokens cannot be 3: give more."


def test_a_crash_shows_the_last_lines_without_the_key(notes: Path) -> None:
    with pytest.raises(ServeFailed) as error, serving(fake(notes, "--fail", "crash"), 2, os.environ, 30):
        pytest.fail("it is not ready")
    assert "exit code 1" in str(error.value)
    assert str(error.value).splitlines()[-1].strip() == "RuntimeError: broken"
    assert "starting ***" in str(error.value)


def test_a_command_that_cannot_run() -> None:
    with pytest.raises(ServeFailed, match="No such file"), serving(lambda _: ["no-such-program"], 2, os.environ, 30):
        pytest.fail("it is not ready")


def test_a_machine_that_starts_no_process(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = fake(notes)(0)
    monkeypatch.setattr(sys, "executable", "/no-such-python")
    with pytest.raises(ServeFailed, match="no-such-python"), serving(lambda _: command, 2, os.environ, 30):
        pytest.fail("it is not ready")


def test_an_end_during_the_measurement_is_a_failure(notes: Path) -> None:
    def kill() -> None:
        os.kill(pid(notes), signal.SIGKILL)
        os.waitid(os.P_PID, pid(notes), os.WEXITED | os.WNOWAIT)

    with pytest.raises(ServeFailed, match="while it was measured"), serving(fake(notes), 2, os.environ, 30):
        kill()


def test_what_ignores_the_stop_is_killed(notes: Path) -> None:
    with serving(fake(notes, "--fail", "stubborn"), 2, os.environ, 30, stop_s=0.2):
        pass
    assert notes.read_text().count("SIGTERM") == 2
    assert gone(notes)


def test_an_interrupt_hurries_the_stop_and_is_not_lost(notes: Path, tmp_path: Path) -> None:
    server = Server(fake(notes, "--fail", "stubborn"), os.environ, tmp_path)
    server.start()
    server.wait_ready(2, 30)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.4)
        with pytest.raises(KeyboardInterrupt):
            server.stop(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gone(notes)


def test_a_signal_to_us_takes_the_way_of_ctrl_c(notes: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        notes.unlink(missing_ok=True)
        with pytest.raises(KeyboardInterrupt), serving(fake(notes), 2, os.environ, 30):
            signal.raise_signal(number)
        assert gone(notes)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers


def test_it_does_not_outlive_us(notes: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from cluster.bench.server import serving\n"
        f"command = lambda port: [sys.executable, {str(FAKE)!r}, str(port), {str(notes)!r}]\n"
        "with serving(command, 2, os.environ, 30):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    env = dict(os.environ) | {"TMPDIR": str(tmp_path)}  # what nobody is left to remove
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while not gone(notes):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert notes.read_text().splitlines()[-1] == "stopped"
