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


class FailsToClose(FakeEngine):
    """Raises when its stream is closed early, as a handle may whose request was never assigned."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        try:
            yield ADMITTED
            while True:
                yield Delta("x", (1,))
        finally:
            raise ReplicaFailed("it cannot even be cancelled")


class CancelledElsewhere(FakeEngine):
    """A stream whose replica-side task was cancelled, as Ray reports it."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        yield ADMITTED
        raise asyncio.CancelledError


async def _read_all(engine: FakeEngine) -> list[tuple[int, Delta]]:
    async with Streams(engine, [REQUEST]) as streams:
        await streams.admitted()
        return [item async for item in streams.deltas()]


OUT_OF_ORDER = [
    (Delta("x", (1,), "stop"),),
    (ADMITTED, Delta("x", (1,)), ADMITTED, Delta("y", (2,), "stop")),
    (ADMITTED, ADMITTED, Delta("", ()), ADMITTED),
]


@pytest.mark.parametrize("events", OUT_OF_ORDER)
async def test_events_out_of_order_are_our_bug(events: tuple[Event, ...]) -> None:
    with pytest.raises(TypeError):
        await _read_all(ListedEvents(*events))


@pytest.mark.parametrize("events", [(), (ADMITTED,), (ADMITTED, ADMITTED), (ADMITTED, Delta("x", (1,)))])
async def test_a_stream_without_an_end_is_a_failed_replica(events: tuple[Event, ...]) -> None:
    with pytest.raises(ReplicaFailed):
        await _read_all(ListedEvents(*events))


async def test_a_stream_cancelled_by_the_replica_does_not_hang() -> None:
    with pytest.raises(ReplicaFailed):
        await asyncio.wait_for(_read_all(CancelledElsewhere()), 1)


async def test_an_error_while_closing_leaves_nothing_behind() -> None:
    """Whatever the reader left in the queue: the error has no reader any more, and must not wait for one."""
    async with asyncio.timeout(1):
        async with Streams(FailsToClose(), [REQUEST, REQUEST]) as streams:
            await streams.admitted()
            await asyncio.sleep(0.01)  # the queue is full now


async def test_a_sequence_that_moves_is_told_of_by_its_last_admission() -> None:
    moved = [Admitted("r1", 1, 1, "retry"), Admitted("r2", 1, 0, "retry")]
    finish = Delta("x", (1,), "stop")
    async with Streams(ListedEvents(ADMITTED, *moved, finish), [REQUEST]) as streams:
        await streams.admitted()
        assert streams.admissions == [ADMITTED]
        assert [item async for item in streams.deltas()] == [(0, finish)]
        assert streams.admissions == moved[-1:]


@pytest.mark.parametrize("mover", [0, 1, 2])
async def test_one_of_several_may_move_while_others_run(mover: int) -> None:
    moved = Admitted("r9", 1, 1)
    engine = FakeEngine(
        lambda request: Script(readmissions=(moved,) if request.choice == mover else (), delay_s=0.001 * request.choice)
    )
    requests = [GenerateRequest(f"id-{choice}", (1,), Sampling(5), choice=choice) for choice in range(3)]
    async with Streams(engine, requests) as streams:
        await streams.admitted()
        deltas = [item async for item in streams.deltas()]
        assert sorted(choice for choice, _ in deltas) == [0, 0, 1, 1, 2, 2]
        expected = ["r9" if choice == mover else "r0" for choice in range(3)]
        assert [event.replica_id for event in streams.admissions] == expected


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


def _in_turn(delay_s: float) -> FakeEngine:
    """Each choice is admitted `delay_s` after the one before."""
    return FakeEngine(lambda request: Script(admit_delay_s=delay_s * request.choice, cached_tokens=1))


def _choices(count: int) -> list[GenerateRequest]:
    return [GenerateRequest(f"id-{choice}", (1, 2), Sampling(5), choice=choice) for choice in range(count)]


@pytest.mark.parametrize(("patience_s", "known"), [(0.0, 3), (5.0, 3), (0.03, 1)])
async def test_whoever_waits_for_all_says_how_long(patience_s: float, known: int) -> None:
    complete: list[int] = []
    streams = Streams(_in_turn(0.1), _choices(3), lambda: complete.append(1))
    async with streams:
        await streams.admitted(patience_s)
        admissions = streams.admissions
        assert [event.replica_id for event in admissions] == ["r0"] * known + [""] * (3 - known)
        assert [event.prompt_tokens for event in admissions] == [2, 2, 2]
        assert len(complete) == (known == 3)
        deltas = [choice for choice, _ in [item async for item in streams.deltas()]]
        assert sorted(deltas) == [0, 0, 1, 1, 2, 2]
        assert [event.cached_tokens for event in streams.admissions] == [1, 1, 1]
    assert complete == [1]


async def test_patience_begins_with_the_first_admission() -> None:
    engine = FakeEngine(lambda request: Script(admit_delay_s=0.1))
    async with Streams(engine, _choices(2)) as streams:
        await streams.admitted(0.05)
        assert [event.replica_id for event in streams.admissions] == ["r0", "r0"]


async def test_an_error_after_the_patience_is_told_among_the_deltas() -> None:
    refusal = ReplicaFailed("gone")
    late, endless = Script(admit_delay_s=0.1, refusal=refusal), Script(endless=True, delay_s=0.001)
    engine = FakeEngine(lambda request: late if request.choice else endless)
    async with Streams(engine, _choices(2)) as streams:
        await streams.admitted(0.01)
        with pytest.raises(ReplicaFailed, match="gone"):
            [item async for item in streams.deltas()]
