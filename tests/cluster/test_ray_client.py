"""Errors and early endings of a stream, with a scripted handle; the real one is in tests/raycluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from actors.errors import ReplicaFailed, ReplicaOverloaded, RequestRefused
from actors.request import Admitted, Delta, Event, GenerateRequest, Sampling
from cluster.ray_client import RayEngineClient, translate

REQUEST = GenerateRequest("r", (1, 2), Sampling(max_tokens=4))
EVENTS: list[Event] = [Admitted("x", 2, 0), Delta("a", (3,)), Delta("", (4,), "length")]


class Response:
    """What a handle returns for a stream: events, then perhaps an error."""

    def __init__(self, events: list[Event], error: Exception | None = None, hang: bool = False) -> None:
        self._events, self._error, self._hang = events, error, hang
        self.cancelled = 0

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._events:
            yield event
        if self._hang:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self.cancelled += 1


class Broadcast:
    def __init__(self, answers: list[Any] | Exception) -> None:
        self._answers = answers

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0
        assert return_exceptions
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers


class Handle:
    """The part of a `DeploymentHandle` that the client uses."""

    def __init__(self, response: Response | None = None, answers: list[Any] | Exception = ()) -> None:  # type: ignore[assignment]
        self._response, self._answers = response, answers

    def options(self, method_name: str, stream: bool) -> Handle:
        assert (method_name, stream) == ("generate", True)
        return self

    def remote(self, request: GenerateRequest) -> Response:
        assert request is REQUEST
        assert self._response is not None
        return self._response

    def broadcast(self, method: str) -> Broadcast:
        assert method == "status"
        return Broadcast(self._answers)


def client(handle: Any) -> RayEngineClient:
    return RayEngineClient(handle)


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
        (ActorDiedError(), ReplicaFailed),
        (TimeoutError(), ReplicaFailed),
        (KeyError("other"), KeyError),
    ],
)
def test_rays_errors_become_ours(error: Exception, kind: type[Exception]) -> None:
    assert type(translate(error)) is kind


@pytest.mark.parametrize("answers", [TimeoutError(), ActorDiedError(), [], [ValueError("x")]])
async def test_status_raises_nothing(answers: Any) -> None:
    assert await client(Handle(answers=answers)).status() == []
