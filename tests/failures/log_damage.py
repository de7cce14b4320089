"""Damages the log in Redis by hand, past every fence: something that is not supposed to be possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import redis

from kvpool.directory import Space
from kvpool.directory.messages import Batch, decode

if TYPE_CHECKING:
    from tests.failures.rig import Field, Process

Damage = Literal["lost", "repeated", "exchanged"]
DAMAGES: Final[tuple[Damage, ...]] = ("lost", "repeated", "exchanged")

_EXCHANGE: Final = """
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
local bytes = {}
for _, entry in ipairs(entries) do bytes[entry[1]] = entry[2][2] end
if not bytes[ARGV[1]] or not bytes[ARGV[2]] then return 0 end
bytes[ARGV[1]], bytes[ARGV[2]] = bytes[ARGV[2]], bytes[ARGV[1]]
redis.call('DEL', KEYS[1])
for _, entry in ipairs(entries) do redis.call('XADD', KEYS[1], entry[1], 'e', bytes[entry[1]]) end
return 1
"""


def newest(url: str, space: Space) -> int:
    """The newest position of the log."""
    with redis.Redis.from_url(url) as client:
        return int(client.hget(f"{space.prefix}:life", "newest") or 0)


def batches_after(url: str, space: Space, pool: str, position: int) -> list[str]:
    """The ids of entries behind `position` that are batches of `pool`."""
    with redis.Redis.from_url(url) as client:
        entries = client.xrange(f"{space.prefix}:log", min=f"{position + 1}-0")
    messages = [(ident.decode(), decode(fields[b"e"])) for ident, fields in entries]
    return [ident for ident, message in messages if isinstance(message, Batch) and message.writer.pool == pool]


def damage_before(field: Field, router: Process, pool: str, kind: Damage) -> None:
    """Damages what is said of `pool` while `router` stands still, so that it comes upon it afterwards."""
    url, space = field.redis.url, router.space
    router.stop()
    position = newest(url, space) + 4  # its blocking read may have been answered already
    batches: list[str] = []

    def enough() -> bool:
        batches[:] = batches_after(url, space, pool, position)
        return len(batches) >= 4

    try:
        field.wait_for(enough, "some batches")
        damage(url, space, kind, batches)
    finally:
        router.go_on()


def damage(url: str, space: Space, kind: Damage, batches: list[str]) -> None:
    """Takes the first of these batches out of the log, says it again at the end, or exchanges it with the second."""
    log = f"{space.prefix}:log"
    with redis.Redis.from_url(url) as client:
        if kind == "lost":
            assert client.xdel(log, batches[0]) == 1
        elif kind == "exchanged":
            assert client.eval(_EXCHANGE, 1, log, batches[0], batches[1]) == 1
        else:
            ((_, fields),) = client.xrange(log, batches[0], batches[0])
            add = (
                "return redis.call('XADD', KEYS[2], redis.call('HINCRBY', KEYS[1], 'newest', 1) .. '-0', 'e', ARGV[1])"
            )
            client.eval(add, 2, f"{space.prefix}:life", log, fields[b"e"])
