"""Many requests, a share of whose clients leave at random points: queued, prefilling, streaming, waiting for a whole answer.

Bounded in requests, concurrency and time. `settled` then reads from /debug/state whether everything was given back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Storm:
    """What to send: `requests` prompts of up to `longest` characters, `leave_share` of whose clients leave early."""

    url: str
    model: str
    requests: int
    longest: int
    concurrency: int = 16
    output_tokens: int = 24
    leave_share: float = 0.3
    leave_within_s: float = 1.0
    seed: int = 0


async def run_storm(storm: Storm) -> Counter[str]:
    """Send everything; counts of `answered`, `left ...` and, for anything else, what went wrong."""
    rng = random.Random(storm.seed)
    plans = [_plan(storm, rng) for _ in range(storm.requests)]
    waiting = iter(plans)
    results: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=storm.concurrency, max_keepalive_connections=storm.concurrency)
    async with httpx.AsyncClient(base_url=storm.url, timeout=120, limits=limits, trust_env=False) as client:

        async def work() -> None:
            for plan in waiting:
                results[await _one(client, plan)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(storm.concurrency):
                group.create_task(work())
    return results


@dataclass(frozen=True, slots=True)
class _Plan:
    body: dict[str, Any]
    leave_after_s: float | None
    leave_after_events: int | None


def _plan(storm: Storm, rng: random.Random) -> _Plan:
    words = f"group {rng.randrange(6)}: " + "the quick brown fox jumps over the lazy dog " * (storm.longest // 44)
    body = {
        "model": storm.model,
        "prompt": words[: rng.randrange(20, storm.longest)] + str(rng.random()),
        "max_tokens": storm.output_tokens,
        "temperature": rng.choice([0, 1]),
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
    }
    if rng.random() >= storm.leave_share:
        return _Plan(body, None, None)
    if body["stream"] and rng.random() < 0.5:
        return _Plan(body, None, rng.randrange(1, storm.output_tokens))
    return _Plan(body, rng.random() * storm.leave_within_s, None)


async def _one(client: httpx.AsyncClient, plan: _Plan) -> str:
    try:
        async with asyncio.timeout(plan.leave_after_s):
            return await _answer(client, plan)
    except TimeoutError:
        return "left by the clock"
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


async def _answer(client: httpx.AsyncClient, plan: _Plan) -> str:
    if not plan.body["stream"]:
        answer = await client.post("/v1/completions", json=plan.body)
        return "answered" if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:200]}"
    events = 0
    async with client.stream("POST", "/v1/completions", json=plan.body) as answer:
        if answer.status_code != 200:
            return f"HTTP {answer.status_code}: {(await answer.aread())[:200]!r}"
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "answered"
            if '"error"' in line:
                return line
            events += line.startswith("data: ")
            if plan.leave_after_events is not None and events >= plan.leave_after_events:
                return "left while streaming"
    return "the stream ended early"


def debug_state(url: str, admin_key: str) -> dict[str, Any]:
    """The body of /debug/state."""
    answer = httpx.get(
        f"{url}/debug/state", headers={"authorization": f"Bearer {admin_key}"}, timeout=30, trust_env=False
    )
    answer.raise_for_status()
    body = answer.json()
    assert isinstance(body, dict)
    return body


def settled(url: str, admin_key: str, before: dict[str, Any], within_s: float = 10.0) -> dict[str, Any]:
    """Wait until every replica is at rest with as many tasks as `before`; the state then. Asserts that it gets there."""
    deadline = time.monotonic() + within_s
    while True:
        state = debug_state(url, admin_key)
        faults = _faults(before, state)
        if not faults:
            return state
        assert time.monotonic() < deadline, faults
        time.sleep(0.1)


def _faults(before: dict[str, Any], state: dict[str, Any]) -> list[str]:
    faults = []
    if state["asyncio_tasks"] > before["asyncio_tasks"]:
        faults.append(f"ingress: {state['asyncio_tasks']} tasks, {before['asyncio_tasks']} before")
    if state["routing"]["bookings"]:
        faults.append(f"{state['routing']['bookings']} bookings are left")
    for old, new in zip(before["replicas"], state["replicas"], strict=True):
        if new["replica_id"] != old["replica_id"]:
            faults.append(f"replica {old['replica_id']} was replaced")
        for name in ("held_blocks", "running", "waiting"):
            if new[name]:
                faults.append(f"{name} is {new[name]}")
        if new["integrity"]:
            faults.append(new["integrity"])
        if new["asyncio_tasks"] > old["asyncio_tasks"]:
            faults.append(f"replica: {new['asyncio_tasks']} tasks, {old['asyncio_tasks']} before")
        if sum(new["blocks"].values()) != new["capacity_blocks"]:
            faults.append(f"blocks sum to {sum(new['blocks'].values())}")
    return faults
