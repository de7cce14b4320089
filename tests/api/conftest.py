"""The application over a scripted engine, in process and behind a real server; every test is checked for leaks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from cluster.api.app import ApiSettings, build_app
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

MODEL = "org/tiny"
CONTEXT = 128
ADMIN_KEY = "open sesame"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def codec() -> ByteCodec:
    return ByteCodec()


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(MODEL, CONTEXT, admin_key=ADMIN_KEY, max_body_bytes=100_000, created=7, status_timeout_s=0.2)


@pytest.fixture(autouse=True)
async def no_leaks(engine: FakeEngine) -> AsyncIterator[None]:
    """No stream of the engine open, no task running, once a test is over."""
    before = asyncio.all_tasks()
    yield
    assert engine.open_streams == 0, "a generator was not closed"
    assert len(engine.closed) == len(engine.requests)
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not leaked, f"tasks left: {leaked}"


@pytest.fixture
def app(settings: ApiSettings, engine: FakeEngine, codec: ByteCodec) -> FastAPI:
    ids, seeds = itertools.count(), itertools.count(1000)
    return build_app(
        settings, engine, codec, new_id=lambda: f"id{next(ids)}", clock=lambda: 1234.5, draw_seed=lambda: next(seeds)
    )


@pytest.fixture
async def client(app: FastAPI, no_leaks: None) -> AsyncIterator[httpx.AsyncClient]:
    """A client in process; exceptions of the application fail the test."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield http


@pytest.fixture
async def server(app: FastAPI, no_leaks: None) -> AsyncIterator[uvicorn.Server]:
    """uvicorn on a free port of the loopback, in this event loop.

    Its three phases are called one by one: `serve()` looks at its exit flag ten times a second only, and every test
    would wait for that.
    """
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    config.load()
    running.lifespan = config.lifespan_class(config)
    await running.startup()
    yield running
    await running.shutdown()


@pytest.fixture
def server_url(server: uvicorn.Server) -> str:
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://{host}:{port}"


@pytest.fixture
async def wire(server_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client over TCP."""
    async with httpx.AsyncClient(base_url=server_url) as http:
        yield http
