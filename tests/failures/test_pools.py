"""Pools' processes that die, stop, come back, are taken over and replaced, with requests going on all the time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import redis

from tests.failures.rig import SPACE

if TYPE_CHECKING:
    from tests.failures.rig import Field

pytestmark = [pytest.mark.redis, pytest.mark.slow]


def test_killed_and_started_again_under_the_same_name(field: Field) -> None:
    first, _ = field.begin(2, routers=2)
    killed = field.kill(first)
    field.note("gone_s", field.gone(first.pool, killed))
    adopter = field.pool(first.pool, how="adopt", path=first.path)
    field.note("adopted_whole_s", field.recovered())
    field.settle()

    killed = field.kill(adopter)
    field.pool(first.pool)  # before the lease is over, with an empty region
    field.note("replaced_whole_s", field.recovered(killed))
    field.finish("killed, started again under the same name")


def test_stopped_for_longer_than_the_lease_and_back(field: Field) -> None:
    first, _ = field.begin(2)
    before = first.state()["publisher"]
    first.process.stop()
    field.note("gone_s", field.gone(first.pool, time.monotonic()))
    field.run(0.2)
    first.process.go_on()
    field.note("back_s", field.recovered())
    after = first.state()["publisher"]
    assert (after["refused"], after["state"]) == ({}, "open")

    def writes_on() -> bool:
        now = first.state()["publisher"]
        return bool(now["seq"] > before["seq"] or now["epoch"] != before["epoch"])

    # It is whole by its heartbeat; a request that changes the pool may be a while after.
    field.wait_for(writes_on, "its changes to be published again")
    field.finish("stopped for longer than the lease, and back")


def test_late_writes_of_a_stopped_publisher_are_refused(field: Field) -> None:
    first, _ = field.begin(2)
    first.process.stop()
    field.gone(first.pool, time.monotonic())
    field.drop(first)
    second = field.pool(first.pool)
    field.note("replaced_whole_s", field.recovered())
    epoch = second.state()["publisher"]["epoch"]
    first.process.go_on()
    field.wait_for(lambda: first.state()["publisher"]["state"] == "lost", "the late writer to give up")
    count = first.state()["count"]
    field.wait_for(lambda: first.state()["count"] > count + 20, "the late writer's pool to change")
    late, now = first.state()["publisher"], second.state()["publisher"]
    assert late["refused"] == {"incarnation": 1}
    assert (now["epoch"], now["refused"], now["state"]) == (epoch, {}, "open")
    field.finish("late writes of a stopped publisher")


def test_the_one_that_publishes_a_shared_region_is_killed(field: Field) -> None:
    both = ["r0", "r1"]
    first = field.pool("shared", replica_ids=both)
    field.wait_for(lambda: first.publishes, "the first to publish")
    second = field.pool("shared", how="attach", path=first.path, replica_ids=both)
    field.router()
    field.router()
    field.recovered()
    field.run(0.4)
    assert second.state()["publisher"]["state"] == "standby"
    killed = field.kill(first)
    field.wait_for(lambda: second.publishes, "the second to take over")
    field.note("taken_over_s", time.monotonic() - killed)
    field.note("whole_s", field.recovered(killed))
    field.settle()

    third = field.pool("shared", how="attach", path=first.path, replica_ids=both)
    field.run(0.2)
    epoch = second.state()["publisher"]["epoch"]
    field.leave(second)  # not the last one: the pool stays
    field.wait_for(lambda: third.publishes, "the third to take over")
    assert third.state()["publisher"]["epoch"] != epoch
    field.recovered()
    field.finish("publisher of a shared region killed")


def test_all_pools_are_replaced_by_new_ones_with_new_names(field: Field) -> None:
    """A redeployment under load: some of the old ones say goodbye, some die; what Redis keeps of them does not pile up."""
    old = field.begin(2, retention_s=2.5)
    for generation in range(3):
        new = [field.pool(f"pool-{generation}-{number}", retention_s=2.5) for number in range(2)]
        field.recovered()
        field.run(0.2)
        field.leave(old[0])
        killed = field.kill(old[1])
        field.note(f"gone_s {generation}", field.gone(old[1].pool, killed))
        field.recovered()
        old = new
    field.settle()
    with redis.Redis.from_url(field.redis.url) as client:
        living = {hand.pool for hand in field.pools}

        def kept() -> set[str]:
            names = [name.decode().removeprefix(SPACE.prefix) for name in client.keys("*")]
            return {name.split(":", 2)[2] for name in names if name.count(":") > 1}

        field.wait_for(lambda: kept() == living, "what belongs to dead pools to be forgotten")
    field.finish("all pools replaced three times")
