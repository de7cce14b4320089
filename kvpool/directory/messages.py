"""What a pool's publisher says, and its bytes.

A writer is (pool, incarnation, epoch): one life of one publisher of one life of a region. It speaks in batches that carry
the numbers 1, 2, 3, ...; a heartbeat repeats the number of the last batch. `digest` is that of the published set after
that batch (`digest.py`). Applying a batch means: take `removed` out (children come before their parents), put `added` in
(parents come before their children); after every single key the set is prefix-closed.

On the wire: one msgpack array, [version, kind, fields...]. Decoding checks every type and bound and raises MalformedEntry;
constructing a message that breaks one raises ValueError.

Bounds: names of 128 characters, 512 keys each way in a batch, 256 replicas, numbers below 2^53 (a Lua script compares
them), 2^26 keys in a snapshot (1 GiB).

A pool may be shared by several replicas, so a heartbeat tells what is free in the pool once, and how busy each replica is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvpool.directory.errors import MalformedEntry
from kvpool.keys import KEY_BYTES

VERSION: Final = 3
MAX_BATCH_KEYS: Final = 512
MAX_SNAPSHOT_KEYS: Final = 1 << 26
MAX_NAME_LENGTH: Final = 128
MAX_REPLICAS: Final = 256
MAX_NUMBER: Final = (1 << 53) - 1
MAX_ENTRY_BYTES: Final = 2 * KEY_BYTES * MAX_BATCH_KEYS + (4 * MAX_NAME_LENGTH + 64) * MAX_REPLICAS

_BATCH, _HEARTBEAT, _GONE, _SNAPSHOT = range(1, 5)


@dataclass(frozen=True, slots=True)
class Writer:
    """Who speaks. `incarnation` and `epoch` are 64-bit nonces: equal or not, never older or newer."""

    pool: str
    incarnation: int
    epoch: int

    def __post_init__(self) -> None:
        check_name(self.pool)
        _integer("incarnation", self.incarnation, (1 << 64) - 1)
        _integer("epoch", self.epoch, (1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy one replica is: prompt tokens it has yet to compute, requests that decode and that wait; the rate is measured."""

    replica_id: str
    queued_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_name(self.replica_id)
        for name in ("queued_prefill_tokens", "running", "waiting"):
            _integer(name, getattr(self, name), MAX_NUMBER)
        _number("prefill_tokens_per_s", self.prefill_tokens_per_s)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What a heartbeat tells of a pool: blocks that hold nothing, and each of the replicas that share it."""

    free_blocks: int = 0
    replicas: tuple[ReplicaLoad, ...] = ()

    def __post_init__(self) -> None:
        _loaded(self.free_blocks, self.replicas)


@dataclass(frozen=True, slots=True)
class Batch:
    """The next change of the published set. Keys are packed, 16 bytes each."""

    writer: Writer
    seq: int
    removed: bytes
    added: bytes
    digest: int

    def __post_init__(self) -> None:
        _numbered(self.seq, self.digest)
        _packed("removed", self.removed, MAX_BATCH_KEYS)
        _packed("added", self.added, MAX_BATCH_KEYS)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The writer lives, its last batch was `seq`; silence longer than `lease_s` means that it is gone.

    `told_at`: when its load was looked at, in seconds of a clock of the writer's own that only runs forward; 0: not told.
    """

    writer: Writer
    seq: int
    digest: int
    lease_s: float
    free_blocks: int
    replicas: tuple[ReplicaLoad, ...]
    told_at: float = 0.0

    def __post_init__(self) -> None:
        _numbered(self.seq, self.digest)
        _number("lease_s", self.lease_s)
        _number("told_at", self.told_at)
        _loaded(self.free_blocks, self.replicas)


@dataclass(frozen=True, slots=True)
class Gone:
    """An orderly goodbye: the pool has left the directory."""

    writer: Writer
    seq: int

    def __post_init__(self) -> None:
        _integer("seq", self.seq, MAX_NUMBER)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole published set after batch `seq`, packed, parents before children."""

    writer: Writer
    seq: int
    keys: bytes
    digest: int

    def __post_init__(self) -> None:
        _numbered(self.seq, self.digest)
        _packed("keys", self.keys, MAX_SNAPSHOT_KEYS)


Message = Batch | Heartbeat | Gone


def encode(message: Message) -> bytes:
    """Returns the bytes of `message`."""
    writer = message.writer
    head = (VERSION, _KINDS[type(message)], writer.pool, writer.incarnation, writer.epoch, message.seq)
    if isinstance(message, Batch):
        return _pack((*head, message.digest, message.removed, message.added))
    if isinstance(message, Heartbeat):
        replicas = [
            (one.replica_id, one.queued_prefill_tokens, one.running, one.waiting, one.prefill_tokens_per_s)
            for one in message.replicas
        ]
        return _pack((*head, message.digest, message.lease_s, message.free_blocks, replicas, message.told_at))
    return _pack(head)


def decode(data: bytes) -> Message:
    """Returns the message in `data`. Raises MalformedEntry."""
    kind, writer, fields = _unpack(data)
    try:
        if kind == _BATCH:
            seq, digest, removed, added = fields
            return Batch(writer, seq, removed, added, digest)
        if kind == _HEARTBEAT:
            seq, digest, lease_s, free_blocks, replicas, told_at = fields
            return Heartbeat(writer, seq, digest, lease_s, free_blocks, _replicas(replicas), told_at)
        if kind == _GONE:
            (seq,) = fields
            return Gone(writer, seq)
    except ValueError as error:
        raise MalformedEntry(f"an entry of pool {writer.pool!r} is malformed: {error}") from None
    raise MalformedEntry(f"an entry of pool {writer.pool!r} has the unknown kind {kind!r:.20}")


def encode_snapshot_head(snapshot: Snapshot) -> bytes:
    """Returns what precedes the keys of a snapshot: writer, seq, digest and the number of bytes to come."""
    writer = snapshot.writer
    head = (VERSION, _SNAPSHOT, writer.pool, writer.incarnation, writer.epoch, snapshot.seq)
    return _pack((*head, snapshot.digest, len(snapshot.keys)))


def decode_snapshot(head: bytes, chunks: Sequence[bytes]) -> Snapshot:
    """Returns the snapshot of a head and its keys. Raises MalformedEntry, also when bytes are missing."""
    kind, writer, fields = _unpack(head)
    keys = b"".join(chunks)
    try:
        if kind != _SNAPSHOT:
            raise ValueError(f"kind {kind!r:.20} is no snapshot")
        seq, digest, size = fields
        if size != len(keys):
            raise ValueError(f"{len(keys)} of {size} bytes of keys are there")
        return Snapshot(writer, seq, keys, digest)
    except ValueError as error:
        raise MalformedEntry(f"the snapshot of pool {writer.pool!r} is malformed: {error}") from None


def split_keys(packed: bytes) -> list[bytes]:
    """Returns the single keys of `packed`."""
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]


def check_name(name: object) -> None:
    """Raises ValueError unless `name` is 1 to 128 printable characters, so that it can stand in a log or a header."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(f"a name has 1 to {MAX_NAME_LENGTH} printable characters, got {name!r:.60}")


_KINDS: Final[dict[type[Message], int]] = {Batch: _BATCH, Heartbeat: _HEARTBEAT, Gone: _GONE}


def _pack(fields: tuple[object, ...]) -> bytes:
    data: bytes = msgpack.packb(fields, use_bin_type=True)
    return data


def _unpack(data: bytes) -> tuple[object, Writer, tuple[Any, ...]]:
    """Returns kind, writer and the fields after them."""
    if len(data) > MAX_ENTRY_BYTES:
        raise MalformedEntry(f"an entry of {len(data)} bytes is longer than {MAX_ENTRY_BYTES}")
    try:
        fields = msgpack.unpackb(data, use_list=False, max_map_len=0, max_ext_len=0)
        if not isinstance(fields, tuple) or len(fields) < 6 or fields[0] != VERSION:
            raise ValueError(f"not an array that starts with version {VERSION}")
        return fields[1], Writer(fields[2], fields[3], fields[4]), fields[5:]
    except (ValueError, RecursionError) as error:
        raise MalformedEntry(f"an entry of {len(data)} bytes is malformed: {error}") from None


def _replicas(records: object) -> tuple[ReplicaLoad, ...]:
    """Returns the loads in a heartbeat's last field. Raises ValueError."""
    if not isinstance(records, tuple) or len(records) > MAX_REPLICAS:
        raise ValueError(f"the replicas of a heartbeat are an array of up to {MAX_REPLICAS}, got {records!r:.60}")
    loads = []
    for record in records:
        if not isinstance(record, tuple) or len(record) != 5:
            raise ValueError(f"a replica of a heartbeat is an array of 5, got {record!r:.60}")
        loads.append(ReplicaLoad(*record))
    return tuple(loads)


def _loaded(free_blocks: object, replicas: object) -> None:
    _integer("free_blocks", free_blocks, MAX_NUMBER)
    if not isinstance(replicas, tuple) or len(replicas) > MAX_REPLICAS:
        raise ValueError(f"replicas is a tuple of up to {MAX_REPLICAS} loads, got {replicas!r:.60}")
    for one in replicas:
        if not isinstance(one, ReplicaLoad):
            raise ValueError(f"replicas is a tuple of ReplicaLoad, got {one!r:.60} in it")
    if len({one.replica_id for one in replicas}) < len(replicas):
        raise ValueError("a replica is in replicas twice: name each once")


def _numbered(seq: object, digest: object) -> None:
    _integer("seq", seq, MAX_NUMBER)
    _integer("digest", digest, (1 << 64) - 1)


def _integer(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is an integer in 0..{most}, got {value!r:.40}")


def _number(name: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} is a finite number, at least 0, got {value!r:.40}")


def _packed(name: str, value: object, most: int) -> None:
    if type(value) is not bytes or len(value) % KEY_BYTES or len(value) > most * KEY_BYTES:
        size = len(value) if isinstance(value, bytes) else repr(value)[:40]
        raise ValueError(f"{name} is up to {most} packed keys of {KEY_BYTES} bytes, got {size}")
