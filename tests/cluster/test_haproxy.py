"""The launcher of HAProxy, and what HAProxy answers by itself once the launcher has edited Ray's configuration."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from jinja2 import Environment

from cluster import ports
from cluster.api.limits import HEADER_BYTES, URL_BYTES
from cluster.haproxy import MARK, bundled_binary, write_launcher


def test_the_launcher_runs_the_bundled_binary(tmp_path: Path) -> None:
    binary = bundled_binary()
    assert binary is not None
    launcher = write_launcher(binary, tmp_path / "bin")
    assert launcher == write_launcher(binary, tmp_path / "bin")
    done = subprocess.run([launcher, "-v"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("HAProxy version")
    files = sorted(str(file.relative_to(tmp_path / "bin")) for file in launcher.parent.rglob("*") if file.is_file())
    answers = [f"haproxy-errors/{status}.http" for status in (400, 503)]
    assert files == ["haproxy-edit.sed", *answers, launcher.name]


def test_arguments_pass_and_splicing_is_off(tmp_path: Path) -> None:
    fake = tmp_path / "a binary"
    fake.write_text('#!/bin/sh\nfor argument in "$@"; do echo "[$argument]"; done\n')
    fake.chmod(0o755)
    done = subprocess.run([write_launcher(fake, tmp_path), "-f", "x y"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["[-dS]", "[-f]", "[x y]"]


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    fake.chmod(0o755)
    script = "import subprocess, sys, time\nsubprocess.Popen([sys.argv[1]])\ntime.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, write_launcher(fake, tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    with parent.stdout:
        parent.stdout.read()  # until the child, which shares it, has let go of it: a moment before it is gone
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SERVER_TIMEOUT_S = 1
HANG_S = 2.0
BODY = b'{"whatever": "the ingress says"}'


class Given(SimpleNamespace):
    """Settings of Ray's, of which whatever is not given is None."""

    def __getattr__(self, name: str) -> None:
        return None


def ray_config(directory: Path, port: int, server_port: int | None) -> str:
    """The configuration that the installed Ray writes, with one backend at `server_port`, or with none."""
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    config = Given(
        log_target="127.0.0.1:514",
        socket_path=directory / "admin.sock",
        maxconn=100,
        nbthread=1,
        bufsize=16384,
        timeout_connect_s=1,
        timeout_client_s=60,
        timeout_server_s=SERVER_TIMEOUT_S,
        timeout_http_keep_alive_s=60,
        retry_on="conn-failure",
        error_file_path=directory / "500.http",
        balance_algorithm="leastconn",
        metrics_port=ports.pick("127.0.0.1"),
        metrics_uri="/metrics",
        frontend_host="127.0.0.1",
        frontend_port=port,
        stats_port=ports.pick("127.0.0.1"),
        stats_uri="/stats",
    )
    backend = Given(name="app", path_prefix="/", servers=[Given(name="s", host="127.0.0.1", port=server_port)])
    hc = Given(default_server_directive="default-server inter 100ms")
    backends = [] if server_port is None else [backend]
    route_info = Given(status=200, routes_content_type="text/plain", routes_message="ok")
    (directory / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
    environment = Environment()
    environment.filters["haproxy_fmt"] = json.dumps
    text = environment.from_string(HAPROXY_CONFIG_TEMPLATE).render(
        config=config,
        backends=backends,
        backends_with_health_config=[Given(backend=each, health_config=hc) for each in backends],
        healthz_rules="",
        route_info=route_info,
    )
    return text + "\n"


@contextlib.contextmanager
def running(directory: Path, server_port: int | None) -> Iterator[str]:
    """HAProxy started as Ray starts it; yields the address of the API. The configuration is in `directory`."""
    port, file = ports.pick("127.0.0.1"), directory / "haproxy.cfg"
    file.write_text(ray_config(directory, port, server_port))
    binary = bundled_binary()
    assert binary is not None
    command = [str(write_launcher(binary, directory / "bin")), "-db", "-f", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 20
            while True:
                assert process.poll() is None, "HAProxy did not take the configuration"
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


class Ingress(http.server.BaseHTTPRequestHandler):
    """Does what the path says: `/dies`, `/hangs`, `/headers` (tells which came), or `/STATUS/TYPE/SUBTYPE`.

    It keeps connections, as the real one does.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer, or not."""
        if self.path == "/dies":
            self.close_connection = True
            return
        if self.path == "/hangs":
            time.sleep(HANG_S)
            return
        if self.path == "/headers":
            self._answer(200, "application/json", json.dumps([name.lower() for name in self.headers]).encode())
            return
        _, status, kind, subtype = self.path.partition("?")[0].split("/")
        self._answer(int(status), f"{kind}/{subtype}; charset=utf-8", BODY)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # HAProxy hangs up on an answer that it replaces
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a HAProxy that knows no ingress, and its directory."""
    directory = tmp_path_factory.mktemp("empty")
    with running(directory, None) as url:
        yield url, directory


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a HAProxy in front of an `Ingress`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ingress) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with running(tmp_path_factory.mktemp("fronted"), server.server_port) as url:
                yield url
        finally:
            server.shutdown()
            thread.join()


def assert_envelope(response: httpx.Response, status: int) -> None:
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/chat/completions"])
def test_without_an_ingress_it_answers_503_in_the_envelope(empty: tuple[str, Path], method: str, path: str) -> None:
    assert_envelope(httpx.request(method, empty[0] + path), 503)


def test_with_an_ingress_that_cannot_be_reached_it_answers_503_in_the_envelope(tmp_path: Path) -> None:
    with running(tmp_path, ports.pick("127.0.0.1")) as url:
        assert_envelope(httpx.get(url), 503)


@pytest.mark.parametrize(
    "what", ["dies", "hangs", *(f"{status}/text/plain" for status in (404, 408, 429, 500, 503, 504))]
)
def test_what_serve_or_a_dying_ingress_says_becomes_503(fronted: str, what: str) -> None:
    assert_envelope(httpx.get(f"{fronted}/{what}", timeout=10), 503)


def test_a_connection_that_has_served_before_dies_as_politely(fronted: str) -> None:
    """HAProxy takes it for one that idled too long and would hang up on the client in silence."""
    for _ in range(3):
        assert httpx.get(f"{fronted}/200/application/json").status_code == 200
        assert_envelope(httpx.get(f"{fronted}/dies"), 503)


def test_what_the_server_in_between_takes_for_no_request_becomes_400(fronted: str) -> None:
    assert_envelope(httpx.get(f"{fronted}/400/text/plain"), 400)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 503])
def test_what_the_ingress_says_passes_untouched(fronted: str, status: int, kind: str) -> None:
    response = httpx.get(f"{fronted}/{status}/{kind}")
    assert (response.status_code, response.content) == (status, BODY)
    assert response.headers["content-type"] == f"{kind}; charset=utf-8"


@pytest.mark.parametrize(
    ("name", "value", "arrives"),
    [
        ("x-session-id", b"a chat of 9 words, ~ and more", True),
        ("x-session-id", b"caf\xc3\xa9", False),
        ("x-session-id", b"\xe9", False),
        ("x-request-id", b"id-1", True),
        ("x-request-id", b"\xff", False),
        ("x-request-timeout-seconds", b"-1", False),
        ("x-request-disconnect-disabled", b"?1", False),
        ("serve_multiplexed_model_id", b"\xff", False),
        ("Serve-Multiplexed-Model-Id", b"other", False),
        ("x-other", b"\xff", True),
    ],
)
def test_a_header_that_serve_obeys_or_breaks_on_does_not_arrive(
    fronted: str, name: str, value: bytes, arrives: bool
) -> None:
    response = httpx.get(f"{fronted}/headers", headers={name.encode(): value})
    assert (response.status_code, name.lower() in response.json()) == (200, arrives)


@pytest.mark.parametrize(
    ("given", "told"), [("id-1", "id-1"), ("i" * 128, "i" * 128), ("i" * 129, None), ("two words", None)]
)
def test_the_request_id_of_the_client_is_on_answers_made_here(fronted: str, given: str, told: str | None) -> None:
    found = httpx.get(f"{fronted}/dies", headers={"x-request-id": given}).headers["x-request-id"]
    assert found == told if told is not None else re.fullmatch("[0-9a-f-]{36}", found)


def test_the_request_id_of_the_ingress_stays(fronted: str) -> None:
    response = httpx.get(f"{fronted}/200/application/json", headers={"x-request-id": "id-1"})
    assert response.headers.get_list("x-request-id") == ["id-1"]


def test_headers_of_every_size_that_the_ingress_bounds_get_there(fronted: str) -> None:
    headers = {"x-long": "v" * HEADER_BYTES}
    response = httpx.get(f"{fronted}/200/application/json?" + "a" * URL_BYTES, headers=headers)
    assert (response.status_code, response.content) == (200, BODY)


def test_the_configuration_is_edited_once_and_nothing_is_open_that_need_not_be(empty: tuple[str, Path]) -> None:
    _, directory = empty
    assert (directory / "admin.sock").stat().st_mode & 0o077 == 0
    edited = (directory / "haproxy.cfg").read_text()
    binary = bundled_binary()
    assert binary is not None
    again = [str(write_launcher(binary, directory / "bin")), "-c", "-f", str(directory / "haproxy.cfg")]
    done = subprocess.run(again, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (directory / "haproxy.cfg").read_text() == edited
    assert edited.count(MARK) == 1
    assert "bind *:" not in edited
    assert "500.http" not in edited
