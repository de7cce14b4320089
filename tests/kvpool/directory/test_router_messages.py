from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.directory import router_messages
from kvpool.directory.errors import MalformedEntry
from kvpool.directory.router_messages import (
    FULL_BYTES,
    MAX_ENTRY_BYTES,
    MAX_RECORDS,
    Beat,
    Changes,
    Gone,
    Hello,
    RouterMessage,
    State,
    decode,
    encode,
    grouped,
)

ORIGIN = "0123456789abcdef"
BOOK = ("book", "r", "replica", 5, ((1, bytes(16)), (2, bytes(16))))
EXAMPLES: list[RouterMessage] = [
    Changes(ORIGIN, 1, (BOOK, ("start", "r"), ("release", "r"))),
    State(ORIGIN, 3, 0, 2, (BOOK,)),
    State(ORIGIN, 3, 0, 1, ()),
    Beat(ORIGIN, 9),
    Hello(ORIGIN, 0),
    Hello(ORIGIN, 0, ("f" * 16,)),
    Gone(ORIGIN, 4),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_what_is_encoded_comes_back(message: RouterMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_field_more_or_less_is_malformed(message: RouterMessage) -> None:
    fields = list(msgpack.unpackb(encode(message)))
    for wrong in ([*fields, 1], fields[:-1], [99, *fields[1:]], [fields[0], 77, *fields[2:]], [fields[0], []]):
        with pytest.raises(MalformedEntry):
            decode(msgpack.packb(wrong))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedEntry):
        decode(data)


scalars = (
    st.none() | st.booleans() | st.integers(-9, 1 << 63) | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
)


@given(st.lists(scalars | st.lists(scalars | st.lists(scalars, max_size=6), max_size=6), max_size=6), st.integers(0, 6))
def test_any_fields_are_a_message_or_malformed(fields: list[object], kind: int) -> None:
    with contextlib.suppress(MalformedEntry):
        decode(msgpack.packb([router_messages.VERSION, kind, ORIGIN, *fields]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Beat("short", 1),
        lambda: Beat(ORIGIN.upper(), 1),
        lambda: Beat(ORIGIN, -1),
        lambda: Beat(ORIGIN, 1 << 53),
        lambda: Changes(ORIGIN, 1, (BOOK,) * (MAX_RECORDS + 1)),
        lambda: Changes(ORIGIN, 1, (("book", "r", "replica"),)),
        lambda: Changes(ORIGIN, 1, ("book",)),  # type: ignore[arg-type]
        lambda: State(ORIGIN, 1, 1, 1, ()),
        lambda: State(ORIGIN, 1, -1, 1, ()),
        lambda: Hello(ORIGIN, 1, ("x",)),
        lambda: Hello(ORIGIN, 1, (ORIGIN,) * 257),
    ],
)
def test_bounds(make: object) -> None:
    with pytest.raises(ValueError, match=r"got"):
        make()  # type: ignore[operator]


def test_an_entry_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(MalformedEntry, match="longer"):
        decode(bytes(MAX_ENTRY_BYTES + 1))


@given(st.lists(st.integers(0, 32), max_size=300))
def test_records_are_grouped_within_the_bounds(rungs: list[int]) -> None:
    longest = "x" * 128
    records = [
        ("book", f"{index}-{longest}"[:128], longest, 5, tuple((1 << rung, bytes(16)) for rung in range(count)))
        for index, count in enumerate(rungs)
    ]
    groups = list(grouped(records))
    assert [record for group in groups for record in group] == records
    for group in groups:
        assert 1 <= len(group) <= MAX_RECORDS
        assert len(encode(Changes(ORIGIN, 1, group))) <= FULL_BYTES + 2048 < MAX_ENTRY_BYTES
