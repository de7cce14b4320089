"""The engine benchmark's HTTP streams: against the real HTTP app over a scripted engine, and against bad answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.bench.engine_client import ask
from cluster.bench.pool_process import BenchFailed
from tests.fakes.engine import FakeEngine

OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-Kvatlas-Replica: r1\r\n\r\n"
END = b"data: [DONE]\n\n"


def event(tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": %d}}\n\n' % tokens


def whole(body: bytes, size: int) -> bytes:
    """`body` in chunks of `size` bytes, wherever they cut it."""
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return OK + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that gives this answer and closes; its address."""
    loop = asyncio.new_event_loop()
    ready, address = threading.Event(), [""]
    done = asyncio.Event()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(one, "127.0.0.1", 0)
        address[0] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await done.wait()
        server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize("size", [1, 7, 80, 100_000])
def test_marks_say_how_many_tokens_had_come(size: int) -> None:
    moments = iter(range(100))
    body = event(0) + event(1) + event(3) + event(3) + event(4) + END
    with answering(whole(body, size)) as url:
        (stream,) = ask(url, "m", [[1, 2]], 4, lambda: next(moments))
    counts = [tokens for _, tokens in stream.marks]
    assert counts == ([4] if size == 100_000 else [1, 3, 4])
    assert (stream.sent_ns, stream.marks[0][0], stream.replica) == (0, 1, "r1")
    assert stream.first_s == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "503 Busy"),
        (whole(event(1) + event(2) + END, 50), "2 of 4 tokens"),
        (whole(END, 50), "0 of 4 tokens"),
        (OK + b"5\r\nda", "bytes read"),
        (OK + b"zz\r\n", "invalid literal"),
        (b"", "bytes read"),
    ],
)
def test_an_answer_that_is_not_complete_is_no_measurement(answer: bytes, words: str) -> None:
    with answering(answer) as url, pytest.raises(BenchFailed, match=f"not complete .*{words}"):
        ask(url, "m", [[1, 2]], 4)


def test_nobody_listens() -> None:
    with answering(b"") as url:
        pass
    with pytest.raises(BenchFailed, match="not complete"):
        ask(url, "m", [[1]], 4)


def test_the_real_app_tells_what_is_read(served_url: str, engine: FakeEngine) -> None:
    """The usage so far, in every event; greedy, past any end; all prompts at once."""
    streams = ask(served_url, "tiny", [[65, 66], [67, 68, 69]], 2)
    assert [stream.marks[-1][1] for stream in streams] == [2, 2]
    assert all(stream.first_s > 0 and stream.replica for stream in streams)
    asked = {request.prompt_token_ids: request.sampling for request in engine.requests}
    assert set(asked) == {(65, 66), (67, 68, 69)}
    assert {(one.max_tokens, one.temperature, one.ignore_eos) for one in asked.values()} == {(2, 0.0, True)}
