"""Many streams at once for a while: most are read to their end, some slowly, some are left, and some requests are wrong.

Each client has one request after the other, each on a connection of its own, over plain sockets: clients share the machine with
the server and must cost little. A slow client has little room in its socket and reads a little at a time, so that the server
feels it.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 65536
SLOW_READ_BYTES = 1024
SLOW_BUFFER_BYTES = 4096
END = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
LIMIT_S = 300.0
"""A request that takes longer is stuck."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """`clients` clients for `seconds`; the shares are of requests, and what is left of them is read to its end at once."""

    url: str
    model: str
    clients: int
    seconds: float
    wrong_share: float = 0.1
    leave_share: float = 0.2
    slow_share: float = 0.1
    longest_prompt: int = 300
    longest_answer: int = 48
    slow_answer: int = 400
    """Tokens of an answer that is read slowly: more than sockets and proxies hold."""
    seed: int = 0


@dataclass(slots=True)
class Outcomes:
    """What came of all requests, and, by its monotonic time, each health check that was not well."""

    results: Counter[str] = field(default_factory=Counter)
    ill: list[str] = field(default_factory=list)
    checks: int = 0
    most_at_once: int = 0
    """Streams that had begun and not ended, at most."""


WRONG: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (400, "/v1/completions", {"temperature": 9}),
    (400, "/v1/completions", {"prompt": ""}),
    (400, "/v1/completions", {"prompt": [10**6]}),
    (400, "/v1/completions", {"max_tokens": -1}),
    (400, "/v1/completions", {"prompt": "word " * 5000}),
    (400, "/v1/chat/completions", {"messages": []}),
    (404, "/v1/completions", {"model": "no-such-model"}),
    (404, "/v1/nothing", {}),
)
"""The answer that a request must get with this in its body."""


async def run_crowd(crowd: Crowd, clock: Callable[[], float] = time.monotonic) -> Outcomes:
    """Runs until the time is over and every client has finished its last request."""
    outcomes = Outcomes()
    until = clock() + crowd.seconds
    one = _Client(crowd, outcomes)

    async def client(number: int) -> None:
        rng = random.Random(crowd.seed * 1_000_003 + number)
        await asyncio.sleep(rng.random() * min(5.0, crowd.seconds / 4))
        while clock() < until:
            try:
                async with asyncio.timeout(LIMIT_S):
                    outcome = await one.request(rng)
            except TimeoutError:
                outcome = "stuck"
            except OSError as error:
                outcome = f"{type(error).__name__}: {error}"
            outcomes.results[outcome] += 1

    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch_health(crowd, outcomes, clock))
        async with asyncio.TaskGroup() as clients:
            for number in range(crowd.clients):
                clients.create_task(client(number))
        watch.cancel()
    return outcomes


class _Client:
    """One request at a time; keeps nothing between them."""

    def __init__(self, crowd: Crowd, outcomes: Outcomes) -> None:
        self._crowd = crowd
        self._outcomes = outcomes
        self._open = 0

    async def request(self, rng: random.Random) -> str:
        """How it went: `answered`, `answered slowly`, `left`, `refused`, or what was wrong."""
        crowd, draw = self._crowd, rng.random()
        if draw < crowd.wrong_share:
            return await self._wrong(rng)
        slow = draw < crowd.wrong_share + crowd.slow_share
        leaves = not slow and draw < crowd.wrong_share + crowd.slow_share + crowd.leave_share
        body = self._body(rng, crowd.slow_answer if slow else rng.randrange(4, crowd.longest_answer))
        reader, writer = await _send(crowd.url, "/v1/completions", json.dumps(body).encode(), slow)
        try:
            if leaves:
                return await self._leave(reader, rng)
            return await self._read(reader, rng, slow)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _body(self, rng: random.Random, tokens: int) -> dict[str, Any]:
        words = f"group {rng.randrange(12)}: " + "the quick brown fox jumps over the lazy dog " * 20
        prompt = words[: rng.randrange(20, self._crowd.longest_prompt)] + str(rng.random())
        return {
            "model": self._crowd.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": rng.choice([0, 1]),
            "ignore_eos": True,
            "stream": True,
        }

    async def _leave(self, reader: asyncio.StreamReader, rng: random.Random) -> str:
        """At any time: before the answer begins, or within it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 3.0):
                while await reader.read(READ_BYTES):
                    pass
        return "left"

    async def _read(self, reader: asyncio.StreamReader, rng: random.Random, slow: bool) -> str:
        size = SLOW_READ_BYTES if slow else READ_BYTES
        data = bytearray(await reader.readuntil(b"\r\n\r\n"))
        if b" 200 " not in data.partition(b"\r\n")[0]:
            return f"not streamed: {bytes(data + await reader.read())[-300:]!r}"
        self._open += 1
        self._outcomes.most_at_once = max(self._outcomes.most_at_once, self._open)
        try:
            while part := await reader.read(size):
                data += part
                if slow:
                    await asyncio.sleep(0.05 + 0.1 * rng.random())
        finally:
            self._open -= 1
        if not data.endswith(LAST_CHUNK) or END not in data[-200:] or b'{"error"' in data:
            return f"a broken stream: {bytes(data[-300:])!r}"
        return "answered slowly" if slow else "answered"

    async def _wrong(self, rng: random.Random) -> str:
        status, path, change = rng.choice(WRONG)
        packed = json.dumps(self._body(rng, 4) | change).encode()
        if rng.random() < 0.2:
            status, path, packed = 400, "/v1/completions", packed[:-9]
        answer = await _answer(self._crowd.url, path, packed)
        if answer.startswith(f"{status} ") and '"error"' in answer and '"message"' in answer:
            return "refused"
        return f"{path} {packed[-120:]!r} was answered {answer[:200]}"


async def _watch_health(crowd: Crowd, outcomes: Outcomes, clock: Callable[[], float]) -> None:
    begun = clock()
    while True:
        asked = clock()
        answer = await _answer(crowd.url, "/health", None)
        outcomes.checks += 1
        if not answer.startswith("200 "):
            outcomes.ill.append(f"after {asked - begun:.0f} s, in {clock() - asked:.1f} s: {answer[-300:]}")
        await asyncio.sleep(1.0)


async def _answer(url: str, path: str, packed: bytes | None) -> str:
    """Status line from its number on, headers and body of an answer that is no stream."""
    reader, writer = await _send(url, path, packed, slow=False)
    try:
        return (await reader.read()).decode(errors="replace").removeprefix("HTTP/1.1 ")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _send(
    url: str, path: str, packed: bytes | None, slow: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(url)
    assert where.hostname is not None
    sock = socket.socket()
    sock.setblocking(False)
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (where.hostname, where.port))
    except BaseException:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=SLOW_BUFFER_BYTES if slow else READ_BYTES)
    head = f"{'GET' if packed is None else 'POST'} {path} HTTP/1.1\r\nhost: {where.netloc}\r\nconnection: close\r\n"
    if packed is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(packed)}\r\n"
    writer.write(f"{head}\r\n".encode() + (packed or b""))
    return reader, writer
