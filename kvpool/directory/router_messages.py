"""What one router tells the others of its bookings, and its bytes.

An origin is one life of one router: a nonce in hexadecimal. It numbers its `Changes` 1, 2, 3, ...; everything else repeats
the number of the last one. Who has followed an origin up to a number has exactly its bookings of that moment. A `State` is all of
them, in parts that follow one another; who has that number already passes over it. `Hello` asks origins for a State.

A record tells one change of one booking: (kind, request, replica, owed tokens, rungs), the last three only for a "book". What
they mean is `router/booking_event.py`'s to say and to check; here a record is bounded plain values.

On the wire: one msgpack array, [version, kind, origin, number, fields...]. Decoding raises MalformedEntry; constructing a message
that breaks a bound raises ValueError.

Bounds: 64 records in a message, 2^20 parts, 256 origins in a Hello, 64 KiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvpool.directory.errors import MalformedEntry
from kvpool.directory.messages import MAX_NUMBER

VERSION: Final = 1
MAX_RECORDS: Final = 64
MAX_PARTS: Final = 1 << 20
MAX_NAMED: Final = 256
MAX_ENTRY_BYTES: Final = 64 << 10
FULL_BYTES: Final = 8 << 10
"""About how long a message with many records becomes before another one is begun."""

Record = tuple[Any, ...]

_CHANGES, _STATE, _BEAT, _HELLO, _GONE = range(1, 6)


@dataclass(frozen=True, slots=True)
class Changes:
    """The next changes, in the order in which they happened."""

    origin: str
    number: int
    records: tuple[Record, ...]

    def __post_init__(self) -> None:
        _head(self.origin, self.number)
        _records(self.records)


@dataclass(frozen=True, slots=True)
class State:
    """Part `part` of `parts` of all bookings after the changes up to `number`."""

    origin: str
    number: int
    part: int
    parts: int
    records: tuple[Record, ...]

    def __post_init__(self) -> None:
        _head(self.origin, self.number)
        if type(self.parts) is not int or type(self.part) is not int or not 0 <= self.part < self.parts <= MAX_PARTS:
            raise ValueError(f"part is in 0..parts-1, got {self.part!r:.40} of {self.parts!r:.40}")
        _records(self.records)


@dataclass(frozen=True, slots=True)
class Beat:
    """The origin lives; `number` is that of its last changes."""

    origin: str
    number: int

    def __post_init__(self) -> None:
        _head(self.origin, self.number)


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks `wanted` for their state; everybody when it is empty."""

    origin: str
    number: int
    wanted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _head(self.origin, self.number)
        if not isinstance(self.wanted, tuple) or len(self.wanted) > MAX_NAMED:
            raise ValueError(f"wanted is a tuple of up to {MAX_NAMED} origins, got {self.wanted!r:.60}")
        for name in self.wanted:
            _origin(name)


@dataclass(frozen=True, slots=True)
class Gone:
    """An orderly goodbye: the origin and its bookings are no more."""

    origin: str
    number: int

    def __post_init__(self) -> None:
        _head(self.origin, self.number)


RouterMessage = Changes | State | Beat | Hello | Gone


def encode(message: RouterMessage) -> bytes:
    """Returns the bytes of `message`."""
    head = (VERSION, _KINDS[type(message)], message.origin, message.number)
    if isinstance(message, Changes):
        return _pack((*head, message.records))
    if isinstance(message, State):
        return _pack((*head, message.part, message.parts, message.records))
    if isinstance(message, Hello):
        return _pack((*head, message.wanted))
    return _pack(head)


def decode(data: bytes) -> RouterMessage:
    """Returns the message in `data`. Raises MalformedEntry."""
    if len(data) > MAX_ENTRY_BYTES:
        raise MalformedEntry(f"an entry of {len(data)} bytes is longer than {MAX_ENTRY_BYTES}")
    try:
        fields = msgpack.unpackb(data, use_list=False, max_map_len=0, max_ext_len=0)
        if not isinstance(fields, tuple) or len(fields) < 4 or fields[0] != VERSION:
            raise ValueError(f"not an array that starts with version {VERSION}")
        kind = _BY_NUMBER.get(fields[1]) if type(fields[1]) is int else None
        if kind is None:
            raise ValueError(f"kind {fields[1]!r:.20} is unknown")
        if len(fields) != 2 + len(kind.__dataclass_fields__):
            raise ValueError(f"{len(fields)} fields are too few or too many for a {kind.__name__}")
        message: RouterMessage = kind(*fields[2:])
    except (ValueError, RecursionError) as error:
        raise MalformedEntry(f"an entry of {len(data)} bytes is no message of a router: {error}") from None
    return message


def grouped(records: Iterable[Record]) -> Iterator[tuple[Record, ...]]:
    """Yields `records` in their order, as many together as one message takes."""
    group: list[Record] = []
    size = 0
    for record in records:
        if group and (size >= FULL_BYTES or len(group) >= MAX_RECORDS):
            yield tuple(group)
            group, size = [], 0
        group.append(record)
        size += _size(record)
    if group:
        yield tuple(group)


_KINDS: Final[dict[type[RouterMessage], int]] = {
    Changes: _CHANGES,
    State: _STATE,
    Beat: _BEAT,
    Hello: _HELLO,
    Gone: _GONE,
}
_BY_NUMBER: Final = {number: kind for kind, number in _KINDS.items()}


def _pack(fields: tuple[object, ...]) -> bytes:
    data: bytes = msgpack.packb(fields, use_bin_type=True)
    return data


def _size(record: Record) -> int:
    """Returns about how many bytes a record takes: rungs of 24, and names."""
    size = 16 + len(record[1])
    return size + len(record[2]) + 24 * len(record[4]) if len(record) > 2 else size


def _head(origin: object, number: object) -> None:
    _origin(origin)
    if type(number) is not int or not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"number is an integer in 0..{MAX_NUMBER}, got {number!r:.40}")


def _origin(name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]{16}", name):
        raise ValueError(f"an origin is 16 hexadecimal digits, got {name!r:.60}")


def _records(records: object) -> None:
    if not isinstance(records, tuple) or len(records) > MAX_RECORDS:
        raise ValueError(f"records is a tuple of up to {MAX_RECORDS}, got {records!r:.60}")
    for record in records:
        if not isinstance(record, tuple) or len(record) not in (2, 5):
            raise ValueError(f"a record is a tuple of 2 or 5, got {record!r:.60}")
