"""Errors and early endings of a stream, with a scripted handle; the real one is in tests/raycluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, RayTaskError, TaskCancelledError
from ray.serve.context import _get_serve_request_context, _set_request_context
from ray.serve.exceptions import BackPressureError

from actors.errors import ReplicaDied, ReplicaFailed, ReplicaOverloaded, RequestRefused
from actors.request import Admitted, Delta, Event, GenerateRequest, Sampling
from cluster import ray_client
from cluster.event_wire import pack
from cluster.prefix_keys import PrefixKeys
from cluster.ray_client import RayEngineClient, translate
from kvpool.directory import DirectoryUnavailable, Space
from kvpool.directory.memory import MemoryReader, MemoryServer
from tests.fakes.engine import READY
from tests.router.scene import Scene

REQUEST = GenerateRequest("r", (1, 2), Sampling(max_tokens=4))
EVENTS: list[Event] = [Admitted("x", 2, 0), Delta("a", (3,)), Delta("", (4,), "length")]


class Response:
    """What a handle returns for a stream: events, then perhaps an error."""

    def __init__(self, events: list[Event], error: Exception | None = None, hang: bool = False) -> None:
        self._events, self._error, self._hang = events, error, hang
        self.cancelled = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield pack(event)
        if self._hang:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self.cancelled += 1


class Answer:
    """One replica's answer to a broadcast: a value, an exception, or none for a long time."""

    def __init__(self, value: Any) -> None:
        self._value = value

    async def get_async(self) -> Any:
        if self._value is NEVER:
            await asyncio.Event().wait()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


NEVER = object()


class Broadcast:
    def __init__(self, answers: list[Any] | Exception) -> None:
        self._answers = answers

    async def _fetch_replica_results_async(self) -> list[Answer]:
        if isinstance(self._answers, Exception):
            raise self._answers
        return [Answer(value) for value in self._answers]


class Handle:
    """The part of a `DeploymentHandle` that the client uses. Each request gets the next of `responses`."""

    def __init__(self, *responses: Response, answers: list[Any] | Exception = ()) -> None:  # type: ignore[assignment]
        self._responses, self._answers = list(responses), answers
        self.asked: list[str] = []

    def options(self, method_name: str, stream: bool, _by_reference: bool) -> Handle:
        assert (method_name, stream, _by_reference) == ("generate", True, False)
        return self

    def remote(self, request: GenerateRequest) -> Response:
        assert request is REQUEST
        return self._responses.pop(0)

    def broadcast(self, method: str) -> Broadcast:
        self.asked.append(method)
        return Broadcast(self._answers)


class NotedPlace:
    """A place among claims that notes what it is told."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def settle(self) -> None:
        self._log.append("settle")

    def end(self) -> None:
        self._log.append("end")

    def __enter__(self) -> NotedPlace:
        return self

    def __exit__(self, *error: object) -> None:
        self._log.append("exit")


class NotedClaims:
    """Claims that keep what they and their places are asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def place(self, request_id: str, keys: bytes) -> NotedPlace:
        self.log.append(f"place {request_id} {len(keys)}")
        return NotedPlace(self.log)


def client(
    handle: Any, scene: Scene | None = None, mirrored: bool = False, claims: NotedClaims | None = None
) -> RayEngineClient:
    scene = scene or Scene(directory=False)
    keys = PrefixKeys(bytes(32), READY)
    if not mirrored:
        return RayEngineClient(handle, scene.service, keys, claims=cast("Any", claims))
    server = MemoryServer(random.Random(1))
    return RayEngineClient(
        handle, scene.service, keys, scene.mirror, lambda: MemoryReader(server, Space("c1", "ab" * 8, 16))
    )


def task_error(cause: Exception) -> Exception:
    """What Ray raises at a caller for `cause` raised in an actor."""
    error: Exception = RayTaskError("generate", "Traceback ...", cause, "p", 1, "127.0.0.1").as_instanceof_cause()
    return error


async def test_a_whole_stream_is_not_cancelled() -> None:
    response = Response(EVENTS)
    assert [event async for event in client(Handle(response)).generate(REQUEST)] == EVENTS
    assert response.cancelled == 0


async def test_closing_early_cancels_once() -> None:
    response = Response(EVENTS)
    events = client(Handle(response)).generate(REQUEST)
    await anext(events)
    await events.aclose()
    assert response.cancelled == 1


async def test_cancelling_the_reader_cancels_once() -> None:
    response = Response(EVENTS[:1], hang=True)

    async def read() -> None:
        async for _ in client(Handle(response)).generate(REQUEST):
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert response.cancelled == 1


async def test_a_refusal_keeps_its_fields() -> None:
    refused = RequestRefused("too long", "prompt", "context_length_exceeded")
    response = Response(EVENTS[:1], task_error(refused))
    with pytest.raises(RequestRefused, match=r"^too long$") as caught:
        async for _ in client(Handle(response)).generate(REQUEST):
            pass
    assert type(caught.value) is RequestRefused
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert response.cancelled == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (task_error(ReplicaOverloaded("full")), ReplicaOverloaded),
        (task_error(ValueError("a bug")), ValueError),
        (BackPressureError(1, 1), ReplicaOverloaded),
        (ActorDiedError(), ReplicaDied),
        (task_error(ActorDiedError()), ReplicaDied),
        (TaskCancelledError(), ReplicaFailed),
        (NodeDiedError("node"), ReplicaFailed),
        (TimeoutError(), ReplicaFailed),
        (KeyError("other"), KeyError),
    ],
)
def test_rays_errors_become_ours(error: Exception, kind: type[Exception]) -> None:
    assert type(translate(error)) is kind


@pytest.mark.parametrize("answers", [TimeoutError(), ActorDiedError(), [], [ValueError("x")]])
async def test_status_raises_nothing(answers: Any) -> None:
    assert await client(Handle(answers=answers)).status() == []


async def test_a_replica_that_is_slow_or_fails_hides_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_client, "ANSWER_S", 0.05)
    assert await client(Handle(answers=[NEVER, READY, ValueError("x")])).status() == [READY]


async def test_the_event_of_admission_says_how_it_was_routed() -> None:
    scene = Scene(directory=False)

    class Routing(Handle):
        def remote(self, request: GenerateRequest) -> Response:
            scene.service.route(request.request_id, ["x"])
            return super().remote(request)

    events = client(Routing(Response(EVENTS)), scene).generate(REQUEST)
    admitted = await anext(events)
    assert isinstance(admitted, Admitted)
    assert "outcome=fallback" in admitted.route
    assert scene.service.report()["bookings"] == 1
    await events.aclose()
    assert scene.service.report()["bookings"] == 0


DIED = ActorDiedError()


@pytest.mark.parametrize("seen", [0, 1], ids=["before it is admitted", "admitted without a token"])
async def test_a_request_without_a_token_goes_to_another_replica_once(seen: int) -> None:
    scene = Scene(directory=False)
    handle = Handle(Response(EVENTS[:seen], DIED), Response([Admitted("y", 2, 1), *EVENTS[1:]]))
    events = [event async for event in client(handle, scene).generate(REQUEST)]
    assert events == [*EVENTS[:seen], Admitted("y", 2, 1), *EVENTS[1:]]
    report = scene.service.report()
    assert (report["retries"], report["bookings"]) == (1, 0)
    assert (report["queried_tokens"], report["measured_tokens"]) == (2, 1)


async def test_a_second_death_is_an_error() -> None:
    handle = Handle(Response(EVENTS[:1], DIED), Response(EVENTS[:1], DIED), Response(EVENTS))
    with pytest.raises(ReplicaDied):
        async for _ in client(handle).generate(REQUEST):
            pass


async def test_a_request_with_a_token_is_not_sent_again() -> None:
    handle = Handle(Response(EVENTS[:2], DIED), Response(EVENTS))
    with pytest.raises(ReplicaDied):
        async for _ in client(handle).generate(REQUEST):
            pass


async def test_only_a_death_is_a_reason_to_send_it_again() -> None:
    handle = Handle(Response([], task_error(ReplicaFailed("its step thread failed"))), Response(EVENTS))
    with pytest.raises(ReplicaFailed, match="step thread"):
        async for _ in client(handle).generate(REQUEST):
            pass


async def test_a_check_of_the_directory_needs_every_replica() -> None:
    handle = Handle(answers=[("r0", b""), ValueError("x")])
    with pytest.raises(DirectoryUnavailable, match="1 of 2 replicas"):
        await client(handle, mirrored=True).check_directory()
    (found,) = await client(Handle(answers=[("r0", bytes(16))]), mirrored=True).check_directory()
    assert (found["pool"], found["pool_blocks"]) == ("", 1)
    assert [place["missing"] for place in found["places"]] == [1, 1]
    assert await client(handle).check_directory() == []


async def test_no_two_calls_share_the_internal_id_by_which_serve_tells_them_apart() -> None:
    seen: list[str] = []

    class Noting(Handle):
        def remote(self, request: GenerateRequest) -> Response:
            seen.append(_get_serve_request_context()._internal_request_id)
            return super().remote(request)

    _set_request_context(_internal_request_id="of the HTTP request", request_id="mine")
    handle = Noting(Response(EVENTS[:1], DIED), Response(EVENTS), Response(EVENTS))
    for _ in range(2):
        assert [event async for event in client(handle).generate(REQUEST)]
    assert len(set(seen)) == 3
    context = _get_serve_request_context()
    assert (context._internal_request_id, context.request_id) == ("of the HTTP request", "mine")


@pytest.mark.parametrize(
    ("responses", "told"),
    [
        ([Response(EVENTS)], ["settle", "send", "end", "exit"]),
        ([Response(EVENTS[:1], DIED), Response(EVENTS)], ["settle", "send", "send", "end", "exit"]),
        ([Response(EVENTS[:1], task_error(ReplicaFailed("x")))], ["settle", "send", "exit"]),
    ],
    ids=["answered", "sent again", "failed"],
)
async def test_a_cold_prefix_is_settled_once_and_before_the_request_is_sent(
    responses: list[Response], told: list[str]
) -> None:
    claims = NotedClaims()

    class Telling(Handle):
        def remote(self, request: GenerateRequest) -> Response:
            claims.log.append("send")
            return super().remote(request)

    try:
        async for _ in client(Telling(*responses), claims=claims).generate(REQUEST):
            pass
    except ReplicaFailed:
        pass
    assert claims.log == ["place r 0", *told]


async def test_a_place_is_left_when_the_reader_goes() -> None:
    claims = NotedClaims()
    events = client(Handle(Response(EVENTS[:1], hang=True)), claims=claims).generate(REQUEST)
    await anext(events)
    await events.aclose()
    assert claims.log[-1] == "exit"


async def test_the_session_of_a_request_reaches_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(directory=False)
    sessions: list[str] = []
    ticket = scene.service.ticket

    def noting(*args: Any, session: str = "") -> Any:
        sessions.append(session)
        return ticket(*args, session=session)

    monkeypatch.setattr(scene.service, "ticket", noting)

    class Lenient(Handle):
        def remote(self, request: GenerateRequest) -> Response:
            return self._responses.pop(0)

    events = client(Lenient(Response(EVENTS)), scene).generate(replace(REQUEST, session="mine"))
    assert [event async for event in events] == EVENTS
    assert sessions == ["mine"]


def test_the_report_tells_of_claims_and_of_what_is_shared() -> None:
    report = client(Handle()).routing()
    assert report["claims"] == {"held": 0, "won": 0, "lost": 0, "timed_out": 0, "unavailable": 0}
    assert report["sharing"] is None
