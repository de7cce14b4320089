"""The log of the routers and their claims in Redis.

Names, behind the hash tag of the space: `routers:life` (hash: nonce of the log, newest position), `routers:log` (stream; entry
n has the ID n-0) and one string for each claim, which expires by itself. Every call but `tip` and `read` is one script,
one round trip.

Memory in Redis: at most `log_entries` + 100 entries, mostly of a few hundred bytes (64 KiB in the worst case); about 150 bytes a
claim. Everything expires when nobody speaks.

Limits: as `redis_backend.py` says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvpool.directory.backend import Cursor, Space, Tip
from kvpool.directory.exchange import Claim, ExchangeBounds, Heard
from kvpool.directory.redis_backend import Log, Server

_APPEND: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[2])
  redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'newest', '0')
end
for index = 4, #ARGV do
  local position = redis.call('HINCRBY', KEYS[1], 'newest', 1)
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], string.format('%d-0', position), 'e', ARGV[index])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
"""
"""Appends entries. KEYS life, log. ARGV nonce for a new log, entries of the log, retention in ms, entries."""

_TAKE: Final = """
local holders = {}
for index, name in ipairs(KEYS) do
  if redis.call('SET', name, ARGV[index + 1], 'NX', 'PX', ARGV[1]) then
    holders[index] = ARGV[index + 1]
  else
    holders[index] = redis.call('GET', name)
  end
end
return holders
"""
"""Returns who holds each after taking those that nobody held. KEYS claims. ARGV life in ms, holders."""

_RENEW: Final = """
for index, name in ipairs(KEYS) do
  if redis.call('GET', name) == ARGV[index + 1] then redis.call('PEXPIRE', name, ARGV[1]) end
end
return 1
"""

_RELEASE: Final = """
for index, name in ipairs(KEYS) do
  if redis.call('GET', name) == ARGV[index + 1] then redis.call('DEL', name) end
end
return 1
"""


class RedisExchange:
    """An `Exchange`. `rng` names logs; give it `random.SystemRandom()`. Raises ValueError for a bad URL."""

    def __init__(
        self,
        url: str,
        space: Space,
        rng: random.Random,
        *,
        bounds: ExchangeBounds | None = None,
        timeout_s: float = 0.5,
        longest_read_s: float = 0.25,
    ) -> None:
        """`longest_read_s` bounds how long one `read` may wait."""
        bounds = bounds or ExchangeBounds()
        self._rng = rng
        self._longest_read_s = longest_read_s
        self._server = Server(url, timeout_s + longest_read_s)
        self._log = Log(self._server, f"{space.prefix}:routers:life", f"{space.prefix}:routers:log")
        self._limits = [bounds.log_entries, round(bounds.retention_s * 1000)]
        self._append: Callable[..., Any] = self._server.client.register_script(_APPEND)

    def __repr__(self) -> str:
        return f"<RedisExchange at {self._server.shown}>"

    def append(self, entries: Sequence[bytes]) -> None:
        """See `Exchange`."""
        nonce = f"{self._rng.getrandbits(64):016x}"
        with self._server.talking():
            self._append([self._log.life, self._log.name], [nonce, *self._limits, *entries])

    def tip(self) -> Tip:
        """See `Exchange`."""
        return self._log.tip()

    def read(self, cursor: Cursor, timeout_s: float) -> Heard:
        """See `Exchange`."""
        found, _ = self._log.read(cursor, min(timeout_s, self._longest_read_s))
        position = found[-1][0] if found else cursor.position
        return Heard(tuple(data for _, data in found), Cursor(cursor.life, position))

    def close(self) -> None:
        """See `Exchange`."""
        self._server.client.close()


class RedisClaimStore:
    """A `ClaimStore`. Raises ValueError for a bad URL."""

    def __init__(self, url: str, space: Space, *, timeout_s: float = 0.25) -> None:
        self._server = Server(url, timeout_s)
        self._prefix = f"{space.prefix}:claim:"
        client = self._server.client
        self._take: Callable[..., Any] = client.register_script(_TAKE)
        self._renew: Callable[..., Any] = client.register_script(_RENEW)
        self._release: Callable[..., Any] = client.register_script(_RELEASE)

    def __repr__(self) -> str:
        return f"<RedisClaimStore at {self._server.shown}>"

    def take(self, claims: Sequence[Claim], life_s: float) -> list[str]:
        """See `ClaimStore`."""
        return [holder.decode() for holder in self._run(self._take, claims, life_s)]

    def renew(self, claims: Sequence[Claim], life_s: float) -> None:
        """See `ClaimStore`."""
        self._run(self._renew, claims, life_s)

    def release(self, claims: Sequence[Claim]) -> None:
        """See `ClaimStore`."""
        self._run(self._release, claims, 0.0)

    def close(self) -> None:
        """See `ClaimStore`."""
        self._server.client.close()

    def _run(self, script: Callable[..., Any], claims: Sequence[Claim], life_s: float) -> Any:
        keys = [self._prefix + claim.key.hex() for claim in claims]
        with self._server.talking():
            return script(keys, [round(life_s * 1000), *(claim.holder for claim in claims)])
