"""The command in this process, and a server that it can ask: the real HTTP app over a scripted engine."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from cluster.api.app import ApiSettings, build_app
from cluster.cli.main import main
from tests.cluster.command import Command, Done
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "open sesame"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with no settings of the machine's, and a runtime directory of its own."""
    for name in os.environ:
        if name.startswith(("KVATLAS_", "RAY_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVATLAS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return dict(os.environ)


@pytest.fixture
def kvatlas(env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: the whole of `main`, with its exit code and its output."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["kvatlas", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        out = capsys.readouterr()
        return Done(code, out.out, out.err)

    return run


@pytest.fixture
def engine() -> FakeEngine:
    """What the server of `served_url` answers with."""
    return FakeEngine()


@pytest.fixture
def served_url(engine: FakeEngine) -> Iterator[str]:
    """Address of the HTTP app over `engine`, in a thread of its own."""
    app = build_app(ApiSettings("tiny", 128, admin_key=ADMIN_KEY), engine, ByteCodec())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup()
        ready.set()
        await done.wait()
        await server.shutdown()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    yield f"http://{host}:{port}"
    loop.call_soon_threadsafe(done.set)
    thread.join(10)
    loop.close()
