from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.directory import messages
from kvpool.directory.errors import MalformedEntry
from kvpool.directory.messages import (
    MAX_BATCH_KEYS,
    MAX_ENTRY_BYTES,
    MAX_NUMBER,
    MAX_REPLICAS,
    VERSION,
    Batch,
    Gone,
    Heartbeat,
    Message,
    PoolLoad,
    ReplicaLoad,
    Snapshot,
    Writer,
)

words = st.integers(0, 2**64 - 1)
numbers = st.integers(0, MAX_NUMBER)
names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=128)
packed = st.integers(0, 8).flatmap(lambda count: st.binary(min_size=16 * count, max_size=16 * count))
rates = st.floats(0, 1e12)
writers = st.builds(Writer, names, words, words)
loads = st.builds(ReplicaLoad, names, numbers, numbers, numbers, rates)
replicas = st.lists(loads, max_size=5, unique_by=lambda load: load.replica_id).map(tuple)
all_messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Batch, writers, numbers, packed, packed, words),
    st.builds(Heartbeat, writers, numbers, words, rates, numbers, replicas),
    st.builds(Gone, writers, numbers),
)
WRITER = Writer("pool", 1, 2)


@given(all_messages)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    assert messages.decode(messages.encode(message)) == message


@given(writers, numbers, packed, words)
def test_a_snapshot_survives_any_cut_into_chunks(writer: Writer, seq: int, keys: bytes, digest: int) -> None:
    snapshot = Snapshot(writer, seq, keys, digest)
    chunks = [keys[start : start + 7] for start in range(0, len(keys), 7)]
    assert messages.decode_snapshot(messages.encode_snapshot_head(snapshot), chunks) == snapshot


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=60), all_messages.map(messages.encode)), st.data())
def test_damage_is_one_typed_error(data: bytes, choose: st.DataObject) -> None:
    place = choose.draw(st.integers(0, len(data)))
    for damaged in (data[:place], data[:place] + b"\xff" + data[place:], data[:place] + data[place + 1 :]):
        try:
            message = messages.decode(damaged)
        except MalformedEntry:
            continue
        assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize(
    "fields",
    [
        (VERSION - 1, 1, "pool", 1, 2, 1, 0, b"", b""),
        (VERSION + 1, 1, "pool", 1, 2, 1, 0, b"", b""),
        (VERSION, 9, "pool", 1, 2, 1),
        (VERSION, 1, "pool", 1, 2, 1, 0, b"", b"x"),
        (VERSION, 1, "pool", 1, 2, 1, 0, b"", "text"),
        (VERSION, 1, "pool", 1, 2, 1, 0, b"", bytes(16 * (MAX_BATCH_KEYS + 1))),
        (VERSION, 1, "pool", 1, 2, MAX_NUMBER + 1, 0, b"", b""),
        (VERSION, 1, "pool", 1, 2, -1, 0, b"", b""),
        (VERSION, 1, "pool", 1, 2, True, 0, b"", b""),
        (VERSION, 1, "pool", 1, 2, 1, 0, b""),
        (VERSION, 1, "a\nb", 1, 2, 1, 0, b"", b""),
        (VERSION, 1, "", 1, 2, 1, 0, b"", b""),
        (VERSION, 1, b"pool", 1, 2, 1, 0, b"", b""),
        (VERSION, 1, "pool", -1, 2, 1, 0, b"", b""),
        (VERSION, 2, "pool", 1, 2, 1, 0, math.nan, 0, ()),
        (VERSION, 2, "pool", 1, 2, 1, 0, "3", 0, ()),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, -1, ()),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 1.0, ()),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, "text"),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, ("text",)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, (("x", 0, 0, 0),)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, (("x", 0, 0, 0, 1.0, 0),)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, (("x", 0, 0, 0, math.inf),)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, (("x", 0, 0, -1, 1.0),)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, (("x", True, 0, 0, 1.0),)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, (("a\nb", 0, 0, 0, 1.0),)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, ((7, 0, 0, 0, 1.0),)),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, (("x", 0, 0, 0, 1.0), ("x", 1, 0, 0, 1.0))),
        (VERSION, 2, "pool", 1, 2, 1, 0, 3.0, 0, tuple((f"r{number}", 0, 0, 0, 1.0) for number in range(257))),
        (VERSION, 3, "pool", 1, 2),
        {"version": 1},
        7,
    ],
)
def test_what_is_out_of_bounds_is_refused(fields: Any) -> None:
    with pytest.raises(MalformedEntry):
        messages.decode(msgpack.packb(fields))


def test_a_message_out_of_bounds_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="packed keys"):
        Batch(WRITER, 1, b"", bytes(15), 0)
    with pytest.raises(ValueError, match="epoch"):
        Writer("pool", 1, 1 << 64)


LOAD = ReplicaLoad("r0")


@pytest.mark.parametrize(
    ("replicas", "why"),
    [
        ([LOAD], "tuple"),
        ((LOAD, LOAD), "twice"),
        ((LOAD, ReplicaLoad("r0", running=3)), "twice"),
        (("r0",), "ReplicaLoad"),
        (tuple(ReplicaLoad(f"r{number}") for number in range(MAX_REPLICAS + 1)), "up to 256"),
    ],
)
def test_replicas_out_of_bounds_are_refused(replicas: Any, why: str) -> None:
    """Where they are collected already, not only where they are sent."""
    with pytest.raises(ValueError, match=why):
        PoolLoad(1, replicas)
    with pytest.raises(ValueError, match=why):
        Heartbeat(WRITER, 1, 1, 3.0, 1, replicas)


@pytest.mark.parametrize(
    "changes", [{"replica_id": ""}, {"running": -1}, {"waiting": 1.5}, {"prefill_tokens_per_s": -1.0}]
)
def test_a_load_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        ReplicaLoad(**{"replica_id": "r0", **changes})


def test_free_blocks_out_of_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="free_blocks"):
        PoolLoad(-1)
    with pytest.raises(ValueError, match="free_blocks"):
        Heartbeat(WRITER, 1, 1, 3.0, MAX_NUMBER + 1, ())


def test_the_largest_message_can_be_read() -> None:
    full = bytes(16 * MAX_BATCH_KEYS)
    batch = Batch(WRITER, MAX_NUMBER, full, full, (1 << 64) - 1)
    assert messages.decode(messages.encode(batch)) == batch
    loads = tuple(
        ReplicaLoad("\U0001f600" * 124 + f"{number:04}", MAX_NUMBER, MAX_NUMBER, MAX_NUMBER, 1e300)
        for number in range(MAX_REPLICAS)
    )
    writer = Writer("\U0001f600" * 128, (1 << 64) - 1, (1 << 64) - 1)
    beat = Heartbeat(writer, MAX_NUMBER, (1 << 64) - 1, 3.0, MAX_NUMBER, loads, 1e300)
    assert messages.decode(messages.encode(beat)) == beat
    with pytest.raises(MalformedEntry, match="longer"):
        messages.decode(bytes(MAX_ENTRY_BYTES + 1))


@pytest.mark.parametrize("what", ["short", "long", "no snapshot", "torn head"])
def test_a_damaged_snapshot_is_malformed(what: str) -> None:
    head = messages.encode_snapshot_head(Snapshot(WRITER, 3, bytes(32), 4))
    chunks = {"short": [bytes(16)], "long": [bytes(48)]}.get(what, [bytes(32)])
    head = {"no snapshot": messages.encode(Gone(WRITER, 3)), "torn head": head[:-1]}.get(what, head)
    with pytest.raises(MalformedEntry):
        messages.decode_snapshot(head, chunks)


def test_split_keys() -> None:
    assert messages.split_keys(b"a" * 16 + b"b" * 16) == [b"a" * 16, b"b" * 16]
    assert messages.split_keys(b"") == []
