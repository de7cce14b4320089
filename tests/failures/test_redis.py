"""Redis dies, hangs, and comes back empty or with old data, with requests going on; then two directories in one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import redis

from kvpool.directory import Space
from tests.failures.prompts import BLOCK_TOKENS
from tests.failures.rig import SPACE

if TYPE_CHECKING:
    from tests.failures.rig import Field

pytestmark = [pytest.mark.redis, pytest.mark.slow]


def test_killed_and_back_empty(field: Field) -> None:
    field.begin(2, routers=2)
    field.redis.stop()
    field.run(0.3)
    field.redis.start()
    back = time.monotonic()
    field.note("whole_s", field.recovered(back))
    field.finish("Redis killed, back empty")


def test_killed_and_back_with_old_data(field: Field) -> None:
    """The old data knows a pool that is gone, and earlier writers of those that live."""
    first, second = field.begin(2, routers=2)
    gone = field.pool("gone")
    field.recovered()
    field.redis.save()
    field.leave(gone)
    killed = field.kill(first)
    field.pool(first.pool, how="adopt", path=first.path)
    field.recovered(killed)
    field.run(0.3)
    field.redis.stop()
    field.run(0.2)
    field.redis.start()
    back = time.monotonic()
    field.note("whole_s", field.recovered(back))
    field.settle()
    newcomer = field.router()  # which knows the directory only as it is now
    assert set(newcomer.ask("look")["pools"]) == {first.pool, second.pool}
    field.finish("Redis killed, back with old data")


def test_hangs_for_five_seconds(field: Field) -> None:
    field.begin(2)
    field.redis.pause()
    field.run(5.0)
    field.redis.resume()
    back = time.monotonic()
    field.note("whole_s", field.recovered(back))
    field.finish("Redis hung for 5 s")


def test_two_clusters_and_two_models_share_one_redis(field: Field) -> None:
    """The same pool names, the same keys: nobody hears of the others, whatever happens to one of them."""
    spaces = [SPACE, Space("other", "ab" * 16, BLOCK_TOKENS), Space("cluster", "cd" * 16, BLOCK_TOKENS)]
    hands = [field.pool("pool", space=space, per_s=30.0) for space in spaces]
    routers = [field.router(space, per_s=15.0) for space in spaces]
    field.recovered()
    field.run(0.4)
    field.settle()
    before = [(router.ask("look"), hand.state()) for router, hand in zip(routers, hands, strict=True)]
    with redis.Redis.from_url(field.redis.url) as client:
        names = [name for name in client.keys("*") if name.startswith(SPACE.prefix.encode())]
        assert names
        client.delete(*names)  # all that one of them has
    cut = time.monotonic()
    field.wait_for(lambda: hands[0].state()["publisher"]["sessions"] > 1, "a new session")
    field.note("whole_s", field.recovered(cut))
    field.kill(hands[0])
    field.gone_from(routers[0], "pool")
    for (seen, state), router, hand in list(zip(before, routers, hands, strict=True))[1:]:
        for name in ("resyncs", "replaced_writers", "gaps", "digest_mismatches"):
            assert router.ask("look")["mirror"].get(name, 0) == seen["mirror"].get(name, 0)
        assert hand.state()["publisher"]["epoch"] == state["publisher"]["epoch"]
    field.pool("pool", space=SPACE, how="adopt", path=hands[0].path)
    field.recovered()
    field.finish("two clusters and two models on one Redis")
