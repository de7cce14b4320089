"""Requests as a replay sees them: when they arrive, how long they are, and which full blocks their prompts have.

A block is named by what it holds and by all that is before it, so the blocks of a trace form a tree. Each of its nodes gets a
number and a random-looking 16-byte key, once; a request is a row of numbers, and its packed keys are made once too. Only full
blocks have keys, as in the pool: the last id of a prompt that does not fill its last block is dropped.

Format of a file: JSON lines, plain or gzipped, as Mooncake publishes its traces: `timestamp` (milliseconds), `input_length` and
`output_length` (tokens), `hash_ids` (one per block of 512 tokens; equal ids, equal blocks).

Such timestamps are rounded (to 3 s in Mooncake's), so requests of one timestamp are spread evenly over the time to the next
one, in their order.

Limits: ids are trusted to name content; the tokens of an answer have no ids, so what a later prompt repeats of it is a hit
only if an earlier prompt had it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.keys import KEY_BYTES
from router.replay.errors import ReplayError

MOONCAKE_BLOCK_TOKENS: Final = 512
MOST_TOKENS: Final = 1 << 24
"""Of a prompt, and of an answer: more than any model takes, and few enough to be computed one by one."""
_LARGEST: Final = 1 << 53
_GZIP: Final = b"\x1f\x8b"

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. Arrays are not to be written to.

    `arrival_s` [n], `input_tokens` [n], `output_tokens` [n]; `first` [n + 1]: where the row of each request begins in
    `nodes`, the numbers of its full blocks. `keys` [nodes, 16]: the key of each node. `length_s`: how long the trace takes,
    the time after the last arrival included.
    """

    block_tokens: int
    arrival_s: FloatArray
    length_s: float
    input_tokens: IntArray
    output_tokens: IntArray
    first: IntArray
    nodes: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def node_count(self) -> int:
        """Different blocks."""
        return len(self.keys)

    def packed_keys(self, request: int) -> bytes:
        """Returns the packed keys of a request's full blocks."""
        return self.keys[self.nodes[self.first[request] : self.first[request + 1]]].tobytes()

    def reusable_tokens(self) -> IntArray:
        """Returns for each request the prompt tokens that one cache which keeps everything would have of it.

        The last prompt token is computed in any case.
        """
        counts = np.diff(self.first)
        owner = np.repeat(np.arange(len(self)), counts)
        born = np.full(self.node_count, len(self), dtype=np.int64)
        np.minimum.at(born, self.nodes, owner)
        # Whoever was first to have a block was first to have all before it, so what is seen is a prefix.
        seen = np.bincount(owner[born[self.nodes] < owner], minlength=len(self))
        reusable: IntArray = np.minimum(seen * self.block_tokens, self.input_tokens - 1)
        return reusable

    def stretched(self, length_s: float) -> Trace:
        """Returns the trace with all times scaled so that it takes `length_s`."""
        return replace(self, arrival_s=self.arrival_s * (length_s / self.length_s), length_s=length_s)

    def unshared(self) -> Trace:
        """Returns the trace with every block of every request made different from all others: nothing can be reused."""
        nodes = np.arange(len(self.nodes), dtype=np.int32)
        return replace(self, nodes=nodes, keys=_keys(len(nodes)))

    def head(self, requests: int) -> Trace:
        """Returns the first `requests` of the trace, as long as they take in it."""
        if requests >= len(self):
            return self
        end = int(self.first[requests])
        return replace(
            self,
            arrival_s=self.arrival_s[:requests],
            length_s=float(self.arrival_s[requests]),
            input_tokens=self.input_tokens[:requests],
            output_tokens=self.output_tokens[:requests],
            first=self.first[: requests + 1],
            nodes=self.nodes[:end],
        )


def read(file: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    """Returns the trace in `file`. Raises ReplayError, which names the line."""
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if data[:2] == _GZIP else data).decode("utf-8-sig")
    except OSError as error:
        if error.strerror is None:  # a gzip's own
            raise ReplayError(f"the trace {file} is a damaged gzip file: give JSON lines, plain or gzipped") from error
        raise ReplayError(f"the trace {file} cannot be read ({error.strerror}): check the path") from error
    except (EOFError, zlib.error) as error:
        raise ReplayError(f"the trace {file} is a damaged gzip file: give JSON lines, plain or gzipped") from error
    except ValueError as error:  # no UTF-8; or a path that is none
        raise ReplayError(f"the trace {file} is no text: give JSON lines, plain or gzipped") from error
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            records.append(_record(line, f"line {number} of {file}", block_tokens))
    if not records:
        raise ReplayError(f"{file} has no requests: give a trace with at least one line")
    records.sort(key=lambda record: record[0])
    millis = np.array([record[0] for record in records], dtype=np.float64)
    arrival_s, length_s = spread(millis / 1000)
    return made(
        block_tokens,
        arrival_s,
        length_s,
        [record[1] for record in records],
        [record[2] for record in records],
        [record[3] for record in records],
    )


def made(
    block_tokens: int,
    arrival_s: FloatArray,
    length_s: float,
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    blocks: Sequence[Iterable[object]],
) -> Trace:
    """Returns the trace of requests given by columns, in order of arrival. `blocks`: what each full block of a prompt holds, as
    anything that may be a key of a dict.
    """
    numbers: dict[tuple[int, object], int] = {}
    nodes: list[int] = []
    first = [0]
    for row in blocks:
        parent = -1
        for content in row:
            parent = numbers.setdefault((parent, content), len(numbers))
            nodes.append(parent)
        first.append(len(nodes))
    return Trace(
        block_tokens,
        arrival_s,
        length_s,
        np.array(input_tokens, dtype=np.int64),
        np.array(output_tokens, dtype=np.int64),
        np.array(first, dtype=np.int64),
        np.array(nodes, dtype=np.int32),
        _keys(len(numbers)),
    )


def spread(stamps_s: FloatArray) -> tuple[FloatArray, float]:
    """Returns the arrivals, from 0 on, of requests with these rounded times (rising), and how long they take together.

    Requests of one time are spread evenly over the step to the next one, those of the last time over a step of median length;
    where there is one time only, they come one a second.
    """
    starts, counts = np.unique(stamps_s, return_counts=True)
    steps = np.diff(starts)
    last = float(np.median(steps)) if len(steps) else float(counts[-1])
    steps = np.append(steps, last)
    place = np.arange(len(stamps_s)) - np.repeat(np.cumsum(counts) - counts, counts)
    arrival_s: FloatArray = np.repeat(starts - starts[0], counts) + place * np.repeat(steps / counts, counts)
    return arrival_s, float(starts[-1] - starts[0] + last)


class _NoRequest(Exception):
    """What is wrong with a line, in words."""


def _record(line: str, where: str, block_tokens: int) -> tuple[int, int, int, list[int]]:
    """Returns timestamp, input, output, ids of full blocks. Raises ReplayError."""
    try:
        record = _object(line)
        stamp = _whole(record, "timestamp", _LARGEST)
        given, answer = (_whole(record, name, MOST_TOKENS) for name in ("input_length", "output_length"))
        ids = record.get("hash_ids")
        if not isinstance(ids, list) or not all(_is_whole(one, _LARGEST) for one in ids):
            raise _NoRequest("hash_ids is no list of whole numbers")
        if given < 1:
            raise _NoRequest("input_length is 0")
        if len(ids) != -(-given // block_tokens):
            raise _NoRequest(f"{len(ids)} hash_ids for {given} tokens")
    except _NoRequest as error:
        raise ReplayError(
            f"{where} is no request of a Mooncake trace ({error}): it needs timestamp, input_length, "
            f"output_length, and hash_ids with one id for each block of {block_tokens} tokens"
        ) from error
    return stamp, given, max(1, answer), [int(one) for one in ids[: given // block_tokens]]


def _object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _NoRequest("it is no JSON") from None
    if not isinstance(record, dict):
        raise _NoRequest("it is no JSON object")
    return record


def _whole(record: dict[str, Any], name: str, most: int) -> int:
    if name not in record:
        raise _NoRequest(f"{name} is missing")
    if not _is_whole(record[name], most):
        raise _NoRequest(f"{name} is a whole number from 0 to {most:,}, got {record[name]!r:.40}")
    return int(record[name])


def _is_whole(value: Any, most: int) -> bool:
    return type(value) in (int, float) and 0 <= value <= most and value == int(value)


def _keys(count: int) -> npt.NDArray[np.uint8]:
    """Returns `count` different keys, the same ones each time."""
    packed = b"".join(
        blake2b(number.to_bytes(8, "little"), digest_size=KEY_BYTES, person=b"kvatlas-replay").digest()
        for number in range(count)
    )
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, KEY_BYTES)
