"""The directory in Redis: a bounded stream for the log, one small hash and one packed list per pool.

Every write is one script (`redis_scripts.py`), one round trip. There is nothing per key: a key costs 16 bytes in its
pool's snapshot and 16 in the log. A snapshot goes over in chunks under a temporary name with a short life, and is swapped
in by RENAME, so a reader never sees half of one; a reader that fetches chunks while one is swapped begins again.

Nothing is repeated behind the caller's back: whether a write that timed out was done is unknown, and the fence is what
sorts it out. Every error of Redis (down, out of memory, wrong password) becomes DirectoryUnavailable.

Memory in Redis: at most `log_entries` + 100 entries of about 200 bytes (16 KiB in the worst case) and 16 bytes per key
and pool, twice while a snapshot is replaced. Fence and snapshot expire by themselves; set `noeviction`.

Limits: Redis 6.2 to 8, Valkey; one server, no Redis Cluster. A password in the URL reaches no message and no repr.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpool.directory import messages, redis_scripts
from kvpool.directory.address import without_password
from kvpool.directory.backend import Bounds, Cursor, LogEntry, PoolInfo, Space, StoredSnapshot, Tail, Tip
from kvpool.directory.errors import DirectoryUnavailable, LogGap, MalformedEntry, WriteRefused
from kvpool.directory.memory import READ_ENTRIES, decoded
from kvpool.directory.messages import Batch, Gone, Message, Snapshot, Writer

CHUNK_BYTES: Final = 64 << 10
CHUNKS_A_CALL: Final = 16
UPLOAD_LIFE_MS: Final = 60_000
_SWAPS: Final = 5
_REASONS: Final[dict[str, str]] = {
    "unknown": "nobody has opened it",
    "incarnation": "another life of the region has the fence",
    "epoch": "another publisher has the fence",
}


class Server:
    """Connections to the server of `url`. Raises ValueError for a bad URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.shown = without_password(url)
        try:
            # Its stubs allow for answers as text and for coroutines, which we never get.
            self.client: Any = redis.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError:
            raise ValueError(f"{self.shown} is not a URL of Redis: redis://, rediss:// or unix://") from None

    def __repr__(self) -> str:
        return f"<Redis at {self.shown}>"

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Turns every failure of Redis into DirectoryUnavailable."""
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise DirectoryUnavailable(
                f"the directory at {self.shown} does not do its work: {type(error).__name__}: {error}"
            ) from None


class Log:
    """Reads a log: the hash `life` (nonce, newest position) and the stream `name`, whose entry n has the ID n-0."""

    def __init__(self, server: Server, life: str, name: str) -> None:
        self.life, self.name = life, name
        self._server = server

    def tip(self) -> Tip:
        """Returns where it is now; life "" while there is none."""
        server = self._server
        with server.talking(), server.client.pipeline(transaction=True) as calls:
            calls.hmget(self.life, "nonce", "newest")
            calls.xrange(self.name, count=1)
            (nonce, newest), first = calls.execute()
        return Tip(_text(nonce), _position(first[0][0]) if first else 0, int(newest or 0))

    def read(self, cursor: Cursor, wait_s: float) -> tuple[list[tuple[int, bytes]], int]:
        """Returns (position, bytes) of entries after `cursor`, and the newest position known. Raises LogGap."""
        server = self._server
        with server.talking(), server.client.pipeline(transaction=False) as calls:
            calls.hmget(self.life, "nonce", "newest")
            calls.xread({self.name: f"{cursor.position}-0"}, count=READ_ENTRIES, block=max(1, round(wait_s * 1000)))
            (nonce, newest_before), streams = calls.execute()
        newest = int(newest_before or 0)
        if _text(nonce) != cursor.life or newest < cursor.position:
            raise LogGap(f"the log at {server.shown} is not the one of position {cursor.position}")
        found = [(_position(ident), fields.get(b"e", b"")) for ident, fields in (streams[0][1] if streams else [])]
        if (found and found[0][0] != cursor.position + 1) or (not found and newest > cursor.position):
            raise LogGap(f"the log at {server.shown} no longer has position {cursor.position + 1}")
        return found, max(newest, found[-1][0] if found else cursor.position)


class _Names:
    """What the parts of a directory of one space are called."""

    def __init__(self, space: Space) -> None:
        prefix = space.prefix
        self.life, self.log, self.pools = f"{prefix}:life", f"{prefix}:log", f"{prefix}:pools"
        self.fences, self.snapshots, self.uploads = f"{prefix}:fence:", f"{prefix}:snapshot:", f"{prefix}:upload:"


class RedisWriter:
    """A `DirectoryWriter`. `rng` names logs; give it `random.SystemRandom()`. Raises ValueError for a bad URL."""

    def __init__(
        self, url: str, space: Space, rng: random.Random, *, bounds: Bounds | None = None, timeout_s: float = 1.0
    ) -> None:
        self._server = Server(url, timeout_s)
        self._names = _Names(space)
        self._rng = rng
        self._bounds = bounds or Bounds()
        self._retention_ms = round(self._bounds.retention_s * 1000)
        self._write: Callable[..., Any] = self._server.client.register_script(redis_scripts.WRITE)
        self._open: Callable[..., Any] = self._server.client.register_script(redis_scripts.OPEN)
        self._replace: Callable[..., Any] = self._server.client.register_script(redis_scripts.REPLACE)

    def __repr__(self) -> str:
        return f"<RedisWriter to {self._server.shown}>"

    def open(self, snapshot: Snapshot) -> int:
        """See `DirectoryWriter`."""
        server, names, pool = self._server, self._names, snapshot.writer.pool
        with server.talking(), self._uploaded(snapshot) as upload:
            keys = [names.life, names.fences + pool, names.snapshots + pool, names.log, names.pools, upload]
            nonce = f"{self._rng.getrandbits(64):016x}"
            return self._answer(
                pool,
                self._open(
                    keys, [*_stamp(snapshot.writer, snapshot.seq), nonce, self._retention_ms, names.fences, pool]
                ),
            )

    def write(self, message: Message) -> int:
        """See `DirectoryWriter`."""
        server, names, pool = self._server, self._names, message.writer.pool
        kind = "batch" if isinstance(message, Batch) else "gone" if isinstance(message, Gone) else "heartbeat"
        keys = [names.life, names.fences + pool, names.snapshots + pool, names.log, names.pools]
        stamp = _stamp(message.writer, message.seq)
        entry = messages.encode(message)
        with server.talking():
            return self._answer(
                pool, self._write(keys, [*stamp, kind, entry, self._retention_ms, self._bounds.log_entries, pool])
            )

    def replace_snapshot(self, snapshot: Snapshot) -> int:
        """See `DirectoryWriter`."""
        server, names, pool = self._server, self._names, snapshot.writer.pool
        with server.talking(), self._uploaded(snapshot) as upload:
            keys = [names.life, names.fences + pool, names.snapshots + pool, upload]
            return self._answer(pool, self._replace(keys, [*_stamp(snapshot.writer, snapshot.seq), self._retention_ms]))

    def close(self) -> None:
        """See `DirectoryWriter`."""
        self._server.client.close()

    @contextlib.contextmanager
    def _uploaded(self, snapshot: Snapshot) -> Iterator[str]:
        """The name under which head and chunks are stored, for the body to swap in. They go when they were not."""
        name = f"{self._names.uploads}{snapshot.writer.pool}:{snapshot.writer.epoch:016x}"
        try:
            self._upload(name, snapshot)
            yield name
        except BaseException:
            with contextlib.suppress(redis.RedisError, OSError):  # else they expire
                self._server.client.delete(name)
            raise

    def _upload(self, name: str, snapshot: Snapshot) -> None:
        client = self._server.client
        parts = [messages.encode_snapshot_head(snapshot)]
        parts += [snapshot.keys[start : start + CHUNK_BYTES] for start in range(0, len(snapshot.keys), CHUNK_BYTES)]
        client.delete(name)
        for start in range(0, len(parts), CHUNKS_A_CALL):
            client.rpush(name, *parts[start : start + CHUNKS_A_CALL])
            client.pexpire(name, UPLOAD_LIFE_MS)

    def _answer(self, pool: str, answer: list[Any]) -> int:
        status, number = answer[0].decode(), int(answer[1])
        if status == "ok":
            return number
        if status == "upload":
            raise DirectoryUnavailable(
                f"{self._server.shown} lost the snapshot of pool {pool!r} before it was complete"
            )
        raise WriteRefused(pool, status, _REASONS.get(status, f"expected {number}"))


class RedisReader:
    """A `DirectoryReader`. Raises ValueError for a bad URL."""

    def __init__(self, url: str, space: Space, *, timeout_s: float = 1.0, longest_read_s: float = 5.0) -> None:
        """`longest_read_s` bounds how long one `read` may wait."""
        self._longest_read_s = longest_read_s
        self._server = Server(url, timeout_s + longest_read_s)
        self._names = _Names(space)
        self._log = Log(self._server, self._names.life, self._names.log)

    def __repr__(self) -> str:
        return f"<RedisReader of {self._server.shown}>"

    def tip(self) -> Tip:
        """See `DirectoryReader`."""
        return self._log.tip()

    def pools(self) -> list[PoolInfo]:
        """See `DirectoryReader`."""
        server = self._server
        with server.talking(), server.client.pipeline(transaction=False) as calls:
            pools = sorted(_text(name) for name in server.client.smembers(self._names.pools))
            for pool in pools:
                calls.hmget(self._names.fences + pool, "incarnation", "epoch", "seq", "at")
            fences = calls.execute()
        return [
            PoolInfo(Writer(pool, int(fence[0], 16), int(fence[1], 16)), int(fence[2]), int(fence[3]))
            for pool, fence in zip(pools, fences, strict=True)
            if fence[0] is not None
        ]

    def snapshot(self, pool: str) -> StoredSnapshot | None:
        """See `DirectoryReader`."""
        name, client = self._names.snapshots + pool, self._server.client
        with self._server.talking():
            for _ in range(_SWAPS):
                head = client.lrange(name, 0, 1)
                if not head:
                    return None
                chunks = self._chunks(name, head)
                if chunks is not None:
                    return StoredSnapshot(messages.decode_snapshot(head[1], chunks), int(head[0]))
        raise DirectoryUnavailable(f"the snapshot of pool {pool!r} was replaced {_SWAPS} times while it was read")

    def _chunks(self, name: str, head: list[bytes]) -> list[bytes] | None:
        """Returns the chunks that belong to `head`; None when it was replaced meanwhile."""
        chunks: list[bytes] = []
        if len(head) != 2:
            raise MalformedEntry(f"a snapshot at {self._server.shown} has no head")
        while True:
            start = 2 + len(chunks)
            with self._server.client.pipeline(transaction=True) as calls:
                calls.lrange(name, 0, 1)
                calls.lrange(name, start, start + CHUNKS_A_CALL - 1)
                head_now, more = calls.execute()
            if head_now != head:
                return None
            chunks += more
            if len(more) < CHUNKS_A_CALL:
                return chunks

    def read(self, cursor: Cursor, timeout_s: float) -> Tail:
        """See `DirectoryReader`."""
        found, newest = self._log.read(cursor, min(timeout_s, self._longest_read_s))
        entries = tuple(LogEntry(position, decoded(data)) for position, data in found)
        return Tail(entries, Cursor(cursor.life, found[-1][0] if found else cursor.position), newest)

    def close(self) -> None:
        """See `DirectoryReader`."""
        self._server.client.close()


def _stamp(writer: Writer, seq: int) -> list[str]:
    return [f"{writer.incarnation:016x}", f"{writer.epoch:016x}", str(seq)]


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode()


def _position(ident: bytes) -> int:
    return int(ident.partition(b"-")[0])
