"""Clients of the HTTP benchmark: streams read with as little work as possible, since they share the machine with the server.

Plain sockets and HTTP/1.1, chunked bodies, connections kept. Tokens are counted by their text, events by their blank lines; an
answer that is not complete is an error, not a sample.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from cluster.bench.http_plan import MARK
from cluster.bench.pool_process import BenchFailed

_MARK: Final = MARK.encode()
_END: Final = b"data: [DONE]\n\n"
_SHOWN_BYTES: Final = 300
LIMIT_S: Final = 60.0
"""No answer may take longer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: seconds to its first token and to its end, and how many events it came in."""

    first_s: float
    whole_s: float
    events: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared: where to send, and what (`body` of the number of a client)."""

    name: str
    path: str
    body: Callable[[int], dict[str, Any]]


class Connection:
    """One kept connection to a server; opened anew where the server has closed it between two requests, as it may."""

    def __init__(self, host: str, port: int, clock: Callable[[], float]) -> None:
        self._where = (host, port)
        self._clock = clock
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, side: Side, number: int) -> Answer:
        """Sends one request and reads its answer. Raises `BenchFailed` unless that is complete."""
        body = side.body(number)
        packed = json.dumps(body).encode()
        head = (
            f"POST {side.path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(packed)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                answer, tokens = await self._exchange(side, head.encode() + packed)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            raise _failed(side, str(error) or type(error).__name__) from error
        if tokens != body["max_tokens"]:
            raise _failed(side, f"{tokens} of {body['max_tokens']} tokens came")
        return answer

    async def _exchange(self, side: Side, request: bytes) -> tuple[Answer, int]:
        kept = self._ends is not None
        reader, writer = self._ends or await asyncio.open_connection(*self._where)
        self._ends = (reader, writer)
        begun = self._clock()
        writer.write(request)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError) as error:
            if not kept or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                raise
            self.close()
            return await self._exchange(side, request)
        return await self._read(side, reader, head, begun)

    async def _read(self, side: Side, reader: asyncio.StreamReader, head: bytes, begun: float) -> tuple[Answer, int]:
        if b" 200 " not in head.partition(b"\r\n")[0] or b"chunked" not in head.lower():
            rest = await reader.read(_SHOWN_BYTES)
            raise _failed(side, (head + rest)[-_SHOWN_BYTES:].decode(errors="replace"))
        first, body = 0.0, bytearray()
        async for data in _chunks(reader):
            body += data
            if not first and _MARK in body:
                first = self._clock() - begun
        if not body.endswith(_END):
            raise _failed(side, f"its stream ends in {bytes(body[-_SHOWN_BYTES:])!r}")
        return Answer(first, self._clock() - begun, body.count(b"\n\n")), body.count(_MARK)

    def close(self) -> None:
        """Ends it."""
        if self._ends is not None:
            self._ends[1].close()
            self._ends = None


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


async def load(
    host: str, port: int, side: Side, requests: int, concurrency: int, clock: Callable[[], float]
) -> list[Answer]:
    """Sends `requests` requests, `concurrency` at a time, each client one after the other; all their answers."""
    left = iter(range(requests))
    answers: list[Answer] = []

    async def client(number: int) -> None:
        with closing(Connection(host, port, clock)) as connection:
            for _ in left:
                answers.append(await connection.ask(side, number))

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(client(number))
    except* BenchFailed as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return answers


def _failed(side: Side, reason: str) -> BenchFailed:
    return BenchFailed(f"An answer of {side.name} is not complete ({reason}): see Ray's logs, and try again.")
