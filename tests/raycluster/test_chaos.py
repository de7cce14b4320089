"""Redis and replicas killed under load: what clients see, and that all is whole again without a restart of anything else."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.raycluster.clients import Load, directory_of, is_whole, remembered
from tests.raycluster.conftest import Served
from tests.raycluster.directory_check import check_is_clean
from tests.raycluster.server_process import regions
from tests.raycluster.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(400)]

LEASE_S = 3.0


def fallbacks_exported(served: Served) -> bool:
    lines = httpx.get(served.metrics_url).text.splitlines()
    return any("kvatlas_router_requests_total" in line and 'outcome="fallback"' in line for line in lines)


def test_redis_killed_under_load_costs_no_request_and_comes_back_whole(served: Served) -> None:
    assert until(lambda: is_whole(served), 60)
    before = [replica["replica_id"] for replica in served.state()["replicas"]]
    with Load(served, 4).running() as load:
        assert until(lambda: load.saw("prefix_hit", 0), 20)
        served.redis.stop()
        killed = time.monotonic()
        assert until(lambda: load.saw("fallback", killed), LEASE_S + 5)
        assert directory_of(served)["state"] == "silent"
        health = httpx.get(f"{served.url}/health/ready").json()
        assert (health["status"], health["directory"]) == ("ok", "silent")
        assert until(lambda: fallbacks_exported(served), 40)

        served.redis.start()  # empty
        assert until(lambda: is_whole(served), 20)
        back = time.monotonic()
        assert until(lambda: load.saw("prefix_hit", back), 20)
    assert set(load.results) == {"ok"}
    check_is_clean(served)

    served.redis.save()
    old = set(regions())
    with Load(served, 4).running() as load:
        time.sleep(1)
        served.redis.stop()
        time.sleep(2)
        served.redis.start()  # with what it knew a while ago
        assert until(lambda: is_whole(served), 20)
    assert set(load.results) == {"ok"}
    check_is_clean(served)
    served.redis.forget()
    assert [replica["replica_id"] for replica in served.state()["replicas"]] == before
    assert regions() >= old


def long_request(served: Served, seed: int) -> str:
    """A prompt of about 1,900 tokens; how its answer ended."""
    rng = random.Random(seed)
    body = {"model": served.model, "prompt": rng.randbytes(950).hex(), "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)
    if answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == 40
        return "ok"
    assert answer.json()["error"]["code"] == "replica_failed", answer.text
    assert answer.headers["retry-after"]
    return str(answer.status_code)


def test_a_replica_killed_under_load_leaves_routing_and_comes_back(served: Served) -> None:
    assert until(lambda: is_whole(served), 60)
    retries = served.state()["routing"]["retries"]
    with ThreadPoolExecutor(48) as clients:
        answers = [clients.submit(long_request, served, seed) for seed in range(48)]
        busy: list[dict[str, Any]] = []

        def is_busy() -> bool:
            busy[:] = [one for one in served.state()["replicas"] if one["waiting"] or one["running"] > 2]
            return bool(busy)

        assert until(is_busy, 20)
        victim = busy[0]
        os.kill(victim["pid"], signal.SIGKILL)
        killed = time.monotonic()
        name = victim["replica_id"]

        def is_gone() -> bool:
            return all(name not in pool["replica_ids"] for pool in directory_of(served)["pools"])

        assert until(is_gone, LEASE_S + 5)
        assert time.monotonic() - killed < LEASE_S + 3
        results = Counter(answer.result() for answer in answers)
    assert set(results) <= {"ok", "503"}
    assert results["ok"] >= 24
    assert served.state()["routing"]["retries"] > retries
    assert until(lambda: is_whole(served), 90)
    assert name not in {replica["replica_id"] for replica in served.state()["replicas"]}
    assert httpx.get(f"{served.url}/health/ready").status_code == 200
    newcomer = {one["replica_id"] for one in served.state()["replicas"]} - {
        one["replica_id"] for one in served.replicas
    }
    assert until(lambda: answered_by(served) in newcomer, 30), "the new replica gets no request"
    check_is_clean(served)


def test_a_replica_killed_under_load_comes_back_warm(served: Served) -> None:
    """Another process takes over the dead one's region: the first repeat of a prompt finds what was cached before."""
    assert until(lambda: is_whole(served), 90)
    rng = random.Random(11)
    prompts = [rng.randbytes(150).hex() for _ in range(6)]
    for prompt in prompts:
        remembered(served, prompt)
    with Load(served, 3).running() as load:
        time.sleep(1)
        known = {prompt: remembered(served, prompt) for prompt in prompts}
        assert all(cached >= 288 for _, cached in known.values()), known
        (name, _), *_ = Counter(replica for replica, _ in known.values()).most_common()
        (victim,) = [one for one in served.state()["replicas"] if one["replica_id"] == name]
        os.kill(victim["pid"], signal.SIGKILL)
        assert until(lambda: name not in {one["replica_id"] for one in served.state()["replicas"]}, 60)
        assert until(lambda: is_whole(served), 90)
    assert all(result == "ok" or "replica_failed" in result for result in load.results)
    (adopter,) = [one for one in served.state()["replicas"] if one["pool"] == victim["pool"]]
    assert adopter["adopted"]
    assert adopter["replica_id"] != name
    for prompt, (replica, cached) in known.items():
        if replica == name:
            assert remembered(served, prompt) == (adopter["replica_id"], cached)
    check_is_clean(served)


def answered_by(served: Served) -> str:
    body = {"model": served.model, "prompt": f"anybody {random.random()}", "max_tokens": 2}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvatlas-replica"]


def test_a_stream_that_has_begun_ends_with_an_error_event(served: Served) -> None:
    assert until(lambda: is_whole(served), 90)
    body = {"model": served.model, "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        (pid,) = [
            one["pid"] for one in served.state()["replicas"] if one["replica_id"] == answer.headers["x-kvatlas-replica"]
        ]
        os.kill(pid, signal.SIGKILL)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert '"replica_failed"' in rest[-2]
    assert until(lambda: is_whole(served), 90)
    assert until(lambda: served.state()["routing"]["bookings"] == 0, 10)
