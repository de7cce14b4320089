"""A client that leaves: queued, prefilling, streaming, collecting, or reading nothing. Its request ends in a second.

Once over an ASGI harness, where the moment is exact, and once over TCP with uvicorn. The fixture `no_leaks` adds to
every test that no generator and no task is left.
"""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tests.api.asgi_call import AsgiCall, eventually
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body
from tests.api.sse_oracle import read_stream
from tests.fakes.engine import FakeEngine, Script

QUEUED = Script(admit_delay_s=60)
PREFILLING = Script(delay_s=60)
STREAMING = Script(endless=True, delay_s=0.002)
STAGES = {"queued": QUEUED, "prefilling": PREFILLING, "streaming": STREAMING}


async def _under_way(engine: FakeEngine, script: Script, count: int = 1) -> None:
    await eventually(lambda: engine.open_streams == count)
    if script is STREAMING:
        await eventually(lambda: engine.deltas_sent >= 3 * count)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_disconnect(app: FastAPI, engine: FakeEngine, stage: str, stream: bool, prompts: int) -> None:
    engine.script = STAGES[stage]
    call = AsgiCall(app, COMPLETIONS, completion_body(prompt=["x"] * prompts, stream=stream))
    await _under_way(engine, engine.script, prompts)
    call.disconnect()
    await asyncio.wait_for(call.task, 1)
    assert engine.open_streams == 0
    assert engine.finished == []


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_by_the_server(app: FastAPI, engine: FakeEngine, stage: str, stream: bool) -> None:
    engine.script = STAGES[stage]
    call = AsgiCall(app, COMPLETIONS, completion_body(prompt=["x", "y"], stream=stream))
    await _under_way(engine, engine.script, 2)
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(call.task), 1)
    assert call.task.cancelled(), "a cancellation must not be swallowed"
    assert engine.open_streams == 0


async def test_a_connection_that_fails_on_receive(app: FastAPI, engine: FakeEngine) -> None:
    engine.script = STREAMING
    call = AsgiCall(app, CHAT, chat_body(stream=True))
    await _under_way(engine, engine.script)
    call.receive_error = ConnectionResetError()
    call.disconnect()
    await asyncio.wait_for(call.task, 1)


async def test_a_connection_that_fails_on_send(
    app: FastAPI, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = STREAMING
    call = AsgiCall(app, CHAT, chat_body(stream=True))
    await _under_way(engine, engine.script)
    call.send_error = BrokenPipeError()
    await asyncio.wait_for(call.task, 1)
    assert caplog.records == [], "a client that leaves is no error of ours"


async def test_a_client_that_leaves_before_its_body_is_complete(app: FastAPI, engine: FakeEngine) -> None:
    call = AsgiCall(app, CHAT, chat_body())
    call._request = []
    call.disconnect()
    await asyncio.wait_for(call.task, 1)
    assert call.sent == []
    assert engine.requests == []


@pytest.mark.parametrize("prompts", [1, 4])
async def test_a_client_that_reads_nothing_holds_the_replica_back(
    app: FastAPI, engine: FakeEngine, prompts: int
) -> None:
    engine.script = Script(endless=True)
    call = AsgiCall(app, COMPLETIONS, completion_body(prompt=["x"] * prompts, stream=True))
    await eventually(lambda: len(call.sent) > 10)
    call.reading.clear()
    before = engine.deltas_sent
    await asyncio.sleep(0.1)
    assert engine.deltas_sent - before <= 4 * prompts, "deltas pile up that nobody reads"
    call.disconnect()
    await asyncio.wait_for(call.task, 1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_over_tcp(wire: httpx.AsyncClient, engine: FakeEngine, stage: str, stream: bool) -> None:
    engine.script = STAGES[stage]
    call = asyncio.create_task(wire.post(CHAT, json=chat_body(stream=stream)))
    await _under_way(engine, engine.script)
    call.cancel()
    await eventually(lambda: engine.open_streams == 0)
    await eventually(call.done)
    engine.script = Script()
    assert (await wire.post(CHAT, json=chat_body())).json()["choices"][0]["message"]["content"] == "Hello world"


async def test_disconnect_after_three_chunks(wire: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = STREAMING
    async with wire.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        lines = response.aiter_lines()
        for _ in range(6):
            await anext(lines)
        await lines.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: engine.open_streams == 0)


async def test_half_of_forty_clients_leave(wire: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of(*"abcdefgh").but(delay_s=0.01)
    calls = [asyncio.create_task(wire.post(CHAT, json=chat_body(stream=index % 4 > 1))) for index in range(40)]
    await eventually(lambda: engine.deltas_sent > 20)
    for call in calls[::2]:
        call.cancel()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    for index, reply in enumerate(replies):
        if index % 2 == 0:
            continue
        assert isinstance(reply, httpx.Response)
        if index % 4 > 1:
            assert read_stream(reply.content, chat=True).texts == {0: "abcdefgh"}
        else:
            assert reply.json()["choices"][0]["message"]["content"] == "abcdefgh"
    await eventually(lambda: engine.open_streams == 0)


async def test_server_stops_while_streaming(
    server: uvicorn.Server, wire: httpx.AsyncClient, engine: FakeEngine
) -> None:
    server.config.timeout_graceful_shutdown = 0
    engine.script = STREAMING
    received = bytearray()

    async def read() -> None:
        async with wire.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            async for data in response.aiter_bytes():
                received.extend(data)

    reading = asyncio.create_task(read())
    await eventually(lambda: received)
    await asyncio.wait_for(server.shutdown(), 2)
    with pytest.raises(httpx.RemoteProtocolError):
        await reading
    assert json.loads(received.split(b"\n\n")[0].removeprefix(b"data: "))["choices"]
    await eventually(lambda: engine.open_streams == 0)


async def test_five_hundred_streams_at_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script.of(*"abc").but(delay_s=0.05)
    replies = await asyncio.gather(*(client.post(CHAT, json=chat_body(stream=True)) for _ in range(500)))
    assert all(read_stream(reply.content, chat=True).texts == {0: "abc"} for reply in replies)
    assert len({request.request_id for request in engine.requests}) == 500


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_client_that_has_left_already_costs_no_replica_anything(
    app: FastAPI, engine: FakeEngine, path: str
) -> None:
    call = AsgiCall(app, path, chat_body(stream=True) if path == CHAT else completion_body(stream=True))
    call.disconnect()
    await asyncio.wait_for(call.task, 1)
    assert engine.requests == []
    assert call.sent == []
