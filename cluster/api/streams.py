"""All sequences of one HTTP request, generated at once and read as one stream.

One task per sequence owns that sequence's generator from its first event to its `aclose()`. The tasks meet in a queue
of bounded length: a client that reads slowly holds the tasks back, and through them the replicas' streams, so memory
does not grow with the answer.

The order is: every sequence is admitted (or the whole request fails, in time for a real HTTP status), then deltas flow,
interleaved. Of many sequences some may have to wait for others to end; whoever waits for all of them says for how long, and
the rest is admitted among the deltas. However it ends, leaving the context closes every generator and waits for every task.

A client may move a sequence to another replica as long as no token of it has arrived. It tells so by another `Admitted`
before the first delta, which takes the place of the one before: `admissions` says who answers in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from actors.errors import ReplicaFailed
from actors.request import Admitted, Delta, Event, GenerateRequest
from cluster.api.lifeline import finish_tasks
from cluster.engine_client import EngineClient

_Item = tuple[int, Event | Exception | None]
_SILENCE: _Item = (-1, None)
OnIdle = Callable[[], Awaitable[None]]


class Streams:
    """An async context: `await admitted()` once, then iterate `deltas()` once."""

    def __init__(
        self, client: EngineClient, requests: Sequence[GenerateRequest], on_admitted: Callable[[], None] = lambda: None
    ) -> None:
        """`on_admitted` is called once, when the last sequence is admitted."""
        self._client = client
        self._requests = requests
        self._on_admitted = on_admitted
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=len(requests))
        self._flows = asyncio.Event()
        self._admissions: dict[int, Admitted] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._on_idle: OnIdle | None = None
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pump(index)) for index in range(len(self._requests))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await finish_tasks(*self._tasks)

    @property
    def admissions(self) -> list[Admitted]:
        """Who serves each sequence as of now, in order of choice. Nobody, and nothing cached, where none is admitted yet."""
        return [
            self._admissions.get(index) or Admitted("", len(request.prompt_token_ids), 0)
            for index, request in enumerate(self._requests)
        ]

    async def admitted(self, patience_s: float = 0.0) -> None:
        """Wait until every sequence is admitted, but from the first on at most `patience_s`, where that is not 0.

        Raises the first sequence's error.
        """
        await self._admit_next()
        patience = asyncio.timeout(patience_s or None)
        try:
            async with patience:
                while len(self._admissions) < len(self._requests):
                    await self._admit_next()
        except TimeoutError:
            if not patience.expired():
                raise  # somebody else's
        self._flows.set()

    async def _admit_next(self) -> None:
        index, event = await self._next()
        if not isinstance(event, Admitted):
            raise TypeError(f"a replica's first event was {type(event).__name__}, not Admitted")
        self._admit(index, event)

    def _admit(self, index: int, event: Admitted) -> None:
        waited = index not in self._admissions
        self._admissions[index] = event
        if waited and len(self._admissions) == len(self._requests):
            self._on_admitted()

    async def deltas(self, idle_s: float = 0.0, on_idle: OnIdle | None = None) -> AsyncGenerator[tuple[int, Delta]]:
        """(choice, delta) pairs until every sequence has finished. Raises the first sequence's error.

        `on_idle` is awaited whenever nothing has come for `idle_s` seconds, 0 for never. What is waited for goes on
        undisturbed: the generators are read by tasks of their own.
        """
        if on_idle is not None and idle_s > 0:
            self._on_idle = on_idle
            self._listen(idle_s)
        running = len(self._requests)
        begun: set[int] = set()
        while running:
            index, event = await self._next()
            if isinstance(event, Admitted) and index not in begun:
                self._admit(index, event)
                continue
            if not isinstance(event, Delta) or index not in self._admissions:
                raise TypeError(f"a replica sent {type(event).__name__} where a Delta belongs")
            begun.add(index)
            running -= event.finish_reason is not None
            yield index, event

    async def _next(self) -> tuple[int, Event]:
        while True:
            index, item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                self._heard_at = asyncio.get_running_loop().time()
                return index, item
            if self._on_idle is not None:
                await self._on_idle()

    def _listen(self, idle_s: float) -> None:
        """Look again when there can have been silence for `idle_s`; put a mark into the queue if there has been.

        One timer for the whole stream: a time limit on each read would cost as much as the rest of the reading.
        """
        loop = asyncio.get_running_loop()
        if loop.time() >= self._heard_at + idle_s:
            self._heard_at = loop.time()
            if self._queue.empty():
                self._queue.put_nowait(_SILENCE)
        self._timer = loop.call_at(self._heard_at + idle_s, self._listen, idle_s)

    async def _pump(self, index: int) -> None:
        """Move one sequence's events into the queue; its errors too, as items."""
        try:
            async with aclosing(self._client.generate(self._requests[index])) as events:
                await self._forward(index, events)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled us: the stream itself was cancelled on the replica's side. Silence would hang the reader.
            await self._queue.put((index, _cancelled_by_replica(exc)))
        except Exception as exc:  # handed to the reader, which raises it
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # there is no reader any more: in a full queue the error would wait for ever
            await self._queue.put((index, exc))

    async def _forward(self, index: int, events: AsyncGenerator[Event]) -> None:
        first = True
        async for event in events:
            await self._queue.put((index, event))
            if isinstance(event, Delta) and event.finish_reason is not None:
                return
            if first:
                await self._flows.wait()
                first = False
        raise ReplicaFailed("the replica ended the stream without a finish reason")


def _cancelled_by_replica(exc: BaseException) -> ReplicaFailed:
    failure = ReplicaFailed("the replica cancelled the request")
    failure.__cause__ = exc
    return failure
