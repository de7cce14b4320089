"""Streams of /v1/completions, read with as little work as possible: the reader shares the machine with the server.

Every event carries the usage so far (`continuous_usage_stats`), which says how many tokens have come by then; nothing else of it
is read. A connection is opened before the clock of its request starts, and used once.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from cluster.bench.engine_rates import Marks
from cluster.bench.pool_process import BenchFailed

LIMIT_S: Final = 300.0
_COUNT: Final = re.compile(rb'"completion_tokens": ?(\d+)')
_REPLICA: Final = re.compile(rb"\r\nx-kvatlas-replica: *([^\r]*)", re.IGNORECASE)
_END: Final = b"data: [DONE]"
_SHOWN_BYTES: Final = 300


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer: when it was asked for, its marks, and which replica gave it."""

    sent_ns: int
    marks: Marks
    replica: str

    @property
    def first_s(self) -> float:
        """Seconds to its first token."""
        return (self.marks[0][0] - self.sent_ns) / 1e9


def ask(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    generated: int,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> list[Stream]:
    """Has the server at `url` continue all `prompts` at the same time. Raises BenchFailed unless every answer is complete."""
    return asyncio.run(_ask(url, model, prompts, generated, clock_ns))


async def _ask(
    url: str, model: str, prompts: Sequence[Sequence[int]], generated: int, clock_ns: Callable[[], int]
) -> list[Stream]:
    where = urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    ends: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        async with asyncio.timeout(LIMIT_S):
            ends += [await asyncio.open_connection(host, port) for _ in prompts]
            requests = [_request(model, prompt, generated) for prompt in prompts]
            streams = await asyncio.gather(
                *(_one(*end, request, clock_ns) for end, request in zip(ends, requests, strict=True))
            )
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise _failed(str(error) or type(error).__name__) from error
    finally:
        for _, writer in ends:
            writer.close()
    for stream in streams:
        if not stream.marks or stream.marks[-1][1] != generated:
            raise _failed(f"{stream.marks[-1][1] if stream.marks else 0} of {generated} tokens came")
    return streams


def _request(model: str, prompt: Sequence[int], generated: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": generated,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    packed = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(packed)}\r\n\r\n"
    )
    return head.encode() + packed


async def _one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, clock_ns: Callable[[], int]
) -> Stream:
    sent_ns = clock_ns()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] or b"chunked" not in head.lower():
        rest = await reader.read(_SHOWN_BYTES)
        raise _failed((head + rest)[-_SHOWN_BYTES:].decode(errors="replace"))
    marks: list[tuple[int, int]] = []
    unread = b""
    async for data in _chunks(reader):
        whole, blank, unread = (unread + data).rpartition(b"\n\n")
        counts = _COUNT.findall(whole) if blank else []
        count = int(counts[-1]) if counts else 0
        if count > (marks[-1][1] if marks else 0):
            marks.append((clock_ns(), count))
        if _END in whole:
            break
    found = _REPLICA.search(head)
    return Stream(sent_ns, marks, found[1].decode(errors="replace") if found else "")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


def _failed(reason: str) -> BenchFailed:
    return BenchFailed(f"An answer of the server is not complete ({reason}): see Ray's logs, and try again.")
