"""Streams: contract violations of a client, and the property that a stream says what a whole reply says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import ReplicaFailed
from actors.request import Admitted, Delta, Event, GenerateRequest, Sampling
from cluster.api.app import ApiSettings, build_app
from cluster.api.streams import Streams
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body
from tests.api.sse_oracle import read_stream
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine, Script

REQUEST = GenerateRequest("id", (1,), Sampling(5))
ADMITTED = Admitted("r0", 1, 0)


class ListedEvents(FakeEngine):
    """Sends the events it was given, in whatever order."""

    def __init__(self, *events: Event) -> None:
        super().__init__()
        self.events = events

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        for event in self.events:
            yield event


class CancelledElsewhere(FakeEngine):
    """A stream whose replica-side task was cancelled, as Ray reports it."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        yield ADMITTED
        raise asyncio.CancelledError


async def _read_all(engine: FakeEngine) -> list[tuple[int, Delta]]:
    async with Streams(engine, [REQUEST]) as streams:
        await streams.admitted()
        return [item async for item in streams.deltas()]


@pytest.mark.parametrize("events", [(Delta("x", (1,), "stop"),), (ADMITTED, ADMITTED)])
async def test_events_out_of_order_are_our_bug(events: tuple[Event, ...]) -> None:
    with pytest.raises(TypeError):
        await _read_all(ListedEvents(*events))


@pytest.mark.parametrize("events", [(), (ADMITTED,), (ADMITTED, Delta("x", (1,)))])
async def test_a_stream_without_an_end_is_a_failed_replica(events: tuple[Event, ...]) -> None:
    with pytest.raises(ReplicaFailed):
        await _read_all(ListedEvents(*events))


async def test_a_stream_cancelled_by_the_replica_does_not_hang() -> None:
    with pytest.raises(ReplicaFailed):
        await asyncio.wait_for(_read_all(CancelledElsewhere()), 1)


async def test_nothing_is_read_after_the_finish() -> None:
    events = (ADMITTED, Delta("x", (1,), "stop"), Delta("y", (2,)))
    assert await _read_all(ListedEvents(*events)) == [(0, events[1])]


PIECES = st.lists(
    st.tuples(st.text(max_size=4), st.lists(st.integers(0, 9), max_size=3).map(tuple)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(splits=st.lists(PIECES, min_size=1, max_size=3), chat=st.booleans(), finish=st.sampled_from(["stop", "length"]))
def test_stream_equals_whole(splits: list[list[tuple[str, tuple[int, ...]]]], chat: bool, finish: str) -> None:
    """For every way to cut text into deltas, text, finish reasons and usage are equal in both modes."""
    splits = splits[:1] if chat else splits
    engine = FakeEngine(lambda request: Script(deltas=tuple(splits[request.choice])).but(finish_reason=finish))
    app = build_app(ApiSettings("org/tiny", 1000), engine, ByteCodec())

    async def both() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            path = CHAT if chat else COMPLETIONS
            body = chat_body() if chat else completion_body(prompt=["x"] * len(splits))
            body["max_tokens"] = 500
            streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
            return await client.post(path, json=body), await client.post(path, json=streamed)

    whole, streamed = asyncio.run(both())
    transcript = read_stream(streamed.content, chat=chat, choices=len(splits), include_usage=True)
    choices = whole.json()["choices"]
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
    assert texts == ["".join(text for text, _ in pieces) for pieces in splits]
    assert transcript.texts == dict(enumerate(texts))
    assert transcript.finish == {choice["index"]: choice["finish_reason"] for choice in choices}
    assert transcript.usage == whole.json()["usage"]
    assert engine.open_streams == 0
