"""Exceptions to statuses; and the envelope where the framework speaks."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from fastapi import FastAPI

from actors.errors import ReplicaFailed, ReplicaOverloaded, RequestRefused
from kvpool.errors import KvatlasError
from tests.api.asgi_call import AsgiCall, eventually
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.api.sse_oracle import read_stream
from tests.fakes.engine import FakeEngine, Script

FAILURES = [
    (RequestRefused("too big", "prompt", "x"), 400, "x"),
    (ReplicaOverloaded("40 waiting"), 503, "server_is_overloaded"),
    (ReplicaFailed("dead in /path"), 503, "replica_failed"),
    (RuntimeError("secret"), 500, None),
    (KvatlasError("secret"), 500, None),
]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_answer_is_a_status(
    client: httpx.AsyncClient, engine: FakeEngine, failure: Exception, status: int, code: str | None, stream: bool
) -> None:
    engine.script = Script(refusal=failure)
    response = await client.post(CHAT, json=chat_body(stream=stream))
    error = error_of(response, status)
    assert error["code"] == code
    assert "/path" not in error["message"]
    if status == 400:
        assert (error["message"], error["param"]) == ("too big", "prompt")
    if status == 500:
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in error["message"]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
async def test_failure_after_the_start_is_an_event(
    client: httpx.AsyncClient, engine: FakeEngine, failure: Exception, status: int, code: str | None
) -> None:
    engine.script = Script(fail_after=1, failure=failure)
    body = chat_body(stream=True, stream_options={"include_usage": True})
    transcript = read_stream((await client.post(CHAT, json=body)).content, chat=True, include_usage=True)
    assert transcript.texts == {0: "Hello"}
    assert transcript.error is not None
    assert transcript.error["code"] == code
    assert transcript.error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert transcript.usage is None


async def test_failure_halfway_of_a_whole_reply_is_a_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script(fail_after=1)
    assert error_of(await client.post(CHAT, json=chat_body()), 503)["code"] == "replica_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_just_ends_is_a_failure(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.script = Script(finish_reason=None)
    response = await client.post(COMPLETIONS, json=completion_body(stream=stream))
    if stream:
        error = read_stream(response.content, chat=False).error
        assert error is not None
        assert error["code"] == "replica_failed"
    else:
        error_of(response, 503)


async def test_our_bugs_are_logged_with_their_traceback(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = Script(refusal=RuntimeError("secret"))
    with caplog.at_level(logging.ERROR, "cluster.api.errors"):
        await client.post(CHAT, json=chat_body(), headers={"x-request-id": "mine"})
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
    assert "mine" in record.getMessage()


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/" + "x" * 3000, "/%ed%a0%80"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
async def test_unknown_route(client: httpx.AsyncClient, path: str, method: str) -> None:
    assert error_of(await client.request(method, path), 404)["code"] == "unknown_url"


GET_ROUTES = ["/v1/models", "/v1/models/org/tiny", "/health", "/health/live", "/health/ready", "/version"]


@pytest.mark.parametrize(
    ("path", "allow"),
    [(path, "GET, HEAD, OPTIONS") for path in GET_ROUTES] + [(CHAT, "OPTIONS, POST"), (COMPLETIONS, "OPTIONS, POST")],
)
async def test_wrong_method_and_options(client: httpx.AsyncClient, path: str, allow: str) -> None:
    for method in ("PUT", "DELETE", "GET" if "POST" in allow else "POST"):
        response = await client.request(method, path)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == allow
    options = await client.request("OPTIONS", path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, allow, b"")


async def test_head(wire: httpx.AsyncClient) -> None:
    for path in GET_ROUTES:
        get, head = await wire.get(path), await wire.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
    for path, status in ((CHAT, 405), ("/nowhere", 404), ("/v1/models/other", 404)):
        response = await wire.head(path)
        assert (response.status_code, response.content) == (status, b"")


async def test_head_does_not_count_on_the_server_to_drop_the_body(app: FastAPI) -> None:
    for path, status in (("/health", 200), ("/nowhere", 404)):
        call = AsgiCall(app, path, None, "HEAD")
        await call.task
        assert (call.status, call.body) == (status, b"")


async def test_a_send_that_fails_after_the_start_cuts_the_connection(app: FastAPI, engine: FakeEngine) -> None:
    engine.script = Script(endless=True, delay_s=0.002)
    call = AsgiCall(app, CHAT, chat_body(stream=True))
    await eventually(lambda: engine.deltas_sent > 3)
    call.send_error = RuntimeError("the server's own bug")
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(call.task, 1)
    assert [message["type"] for message in call.sent].count("http.response.start") == 1
