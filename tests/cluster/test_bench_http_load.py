"""The HTTP benchmark's clients against servers that answer well, badly, or not at all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from cluster.bench.http_load import Answer, Connection, Side, load
from cluster.bench.http_plan import MARK
from cluster.bench.pool_process import BenchFailed

OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = f"data: {MARK}\n\n".encode()
END = b"data: [DONE]\n\n"

Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(tokens: int, size: int = 1000) -> bytes:
    """A good answer of `tokens` tokens in chunks of `size` bytes."""
    body = EVENT * tokens + END
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return OK + b"".join(map(chunk, pieces)) + chunk(b"")


@asynccontextmanager
async def answering(*answers: bytes, then_close: bool = False) -> AsyncIterator[int]:
    """A server that gives these answers, over and over; `then_close`: and closes the connection after each. Its port."""
    next_answer = itertools.cycle(answers)
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with closing(writer):
            while (head := await reader.readuntil(b"\r\n\r\n")) and not writer.is_closing():
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(next(next_answer))
                await writer.drain()
                if then_close:
                    return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def side(tokens: int = 3) -> Side:
    return Side("kvatlas", "/v1", lambda number: {"max_tokens": tokens, "prompt": f"of {number}"})


def ticking() -> Callable[[], float]:
    """A clock that goes on by a second each time it is read."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_tokens_and_events_are_counted_however_they_are_cut(size: int) -> None:
    async with answering(whole(3, size)) as port:
        with closing(Connection("127.0.0.1", port, ticking())) as connection:
            assert await connection.ask(side(), 0) == Answer(1.0, 2.0, 4)
            assert await connection.ask(side(), 0) == Answer(1.0, 2.0, 4)


async def test_a_connection_that_the_server_has_closed_is_opened_anew() -> None:
    async with answering(whole(3), then_close=True) as port:
        with closing(Connection("127.0.0.1", port, ticking())) as connection:
            for _ in range(3):
                assert (await connection.ask(side(), 0)).events == 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "503 Busy"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "content-length"),
        (whole(2), "2 of 3 tokens"),
        (OK + chunk(EVENT * 3) + chunk(b""), "stream ends in"),
        (OK + chunk(EVENT * 3 + END + b'data: {"error": 1}\n\n') + chunk(b""), "error"),
        (OK + b"nonsense\r\n", "nonsense"),
    ],
)
async def test_an_answer_that_is_not_complete_is_an_error(answer: bytes, words: str) -> None:
    async with answering(answer) as port:
        with pytest.raises(BenchFailed, match="kvatlas is not complete") as failed:
            await load("127.0.0.1", port, side(), 4, 2, ticking())
    assert words in str(failed.value)


async def test_a_server_that_is_gone() -> None:
    async with answering(whole(3)) as port:
        pass
    with pytest.raises(BenchFailed):
        await load("127.0.0.1", port, side(), 1, 1, ticking())


async def test_a_connection_cut_within_an_answer_is_an_error_and_not_asked_again() -> None:
    async with answering(whole(3)[:-9], then_close=True) as port:
        with closing(Connection("127.0.0.1", port, ticking())) as connection, pytest.raises(BenchFailed):
            await connection.ask(side(), 0)


async def test_a_load_asks_as_often_as_it_should_and_each_client_for_its_own() -> None:
    asked: list[int] = []

    def body(number: int) -> dict[str, Any]:
        asked.append(number)
        return {"max_tokens": 3}

    async with answering(whole(3)) as port:
        answers = await load("127.0.0.1", port, Side("kvatlas", "/v1", body), 10, 4, ticking())
    assert len(answers) == len(asked) == 10
    assert set(asked) == {0, 1, 2, 3}
