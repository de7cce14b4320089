"""The whole application over real Ray: answers, reuse, aborts, errors, metrics."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from actors.errors import RequestRefused
from actors.request import Admitted, Delta, GenerateRequest, Sampling
from cluster.app import APP_NAME, ENGINE_NAME
from cluster.prefix_keys import PrefixKeys
from cluster.ray_client import RayEngineClient
from tests.fakes.engine import READY
from tests.raycluster.conftest import REPLICAS, Served
from tests.raycluster.waiting import until
from tests.router.scene import Scene

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def is_idle(served: Served) -> bool:
    """No block held, nobody running or waiting, invariants intact."""
    return all(
        (replica["held_blocks"], replica["running"], replica["waiting"], replica["integrity"]) == (0, 0, 0, "")
        for replica in served.state()["replicas"]
    )


def totals(served: Served) -> tuple[int, int]:
    """Prompt tokens looked up and found, over all replicas since they started."""
    replicas = served.state()["replicas"]
    return sum(one["prefix_queried_tokens"] for one in replicas), sum(one["prefix_hit_tokens"] for one in replicas)


def complete(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"model": served.model, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    assert isinstance(value, dict)
    return value


@pytest.fixture
def client(served: Served) -> RayEngineClient:
    """A client in this process, which has no router of its own: Serve takes any replica."""
    from ray import serve

    handle = serve.get_deployment_handle(ENGINE_NAME, APP_NAME)
    return RayEngineClient(handle, Scene(directory=False).service, PrefixKeys(bytes(32), READY))


def test_ready_reports_every_replica(served: Served) -> None:
    assert len(served.replicas) == REPLICAS
    for replica in served.replicas:
        assert replica["mode"] == "exact"
        assert replica["capacity_blocks"] * replica["block_tokens"] == 4096
        assert {"import", "load", "allocate", "warm-up"} <= set(replica["load_s"])
        assert set(replica["load_bytes"]) == {"load", "allocate"}
    health = httpx.get(f"{served.url}/health/ready").json()
    assert health == {"status": "ok", "replicas": REPLICAS, "directory": "live"}


def test_the_same_prompt_again_is_cached_and_answers_the_same(served: Served) -> None:
    prompt = "the atlas lists every block " * 4
    first, again = complete(served, prompt=prompt), complete(served, prompt=prompt)
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert again["usage"]["completion_tokens"] == 8
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_usage_and_the_pool_count_the_same_hits(served: Served) -> None:
    before = totals(served)
    usages = [complete(served, prompt=f"count me {number % 3} " * 6)["usage"] for number in range(9)]
    after = totals(served)
    queried, hit = after[0] - before[0], after[1] - before[1]
    assert queried == sum(usage["prompt_tokens"] for usage in usages)
    assert hit == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert hit > 0


def test_one_request_id_per_answer(served: Served) -> None:
    for given in ({"x-request-id": "mine-1"}, {}):
        answer = httpx.get(f"{served.url}/health/live", headers=given)
        assert len(answer.headers.get_list("x-request-id")) == 1
        assert answer.headers["x-request-id"] == given.get("x-request-id", answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b'{"model": "other", "prompt": "x"}', 404),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/completions", b"", 405),
    ],
)
def test_errors_come_through_the_proxy_in_the_envelope(
    served: Served, method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(method, served.url + path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_a_prompt_beyond_the_context_is_a_400(served: Served) -> None:
    body = {"model": served.model, "prompt": "x" * 5000, "max_tokens": 1}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_client_that_leaves_gives_its_blocks_back(served: Served) -> None:
    body = {"model": served.model, "prompt": "leave me", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
    assert until(lambda: is_idle(served))


def request(name: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, (3, 4, 5, 6), Sampling(**{"max_tokens": 400, "ignore_eos": True} | sampling))


async def test_closing_the_clients_generator_aborts_at_the_replica(served: Served, client: RayEngineClient) -> None:
    events = client.generate(request("close-early"))
    assert isinstance(await anext(events), Admitted)
    assert isinstance(await anext(events), Delta)
    await events.aclose()
    assert await asyncio.to_thread(until, lambda: is_idle(served))


async def test_cancelling_the_reader_aborts_at_the_replica(served: Served, client: RayEngineClient) -> None:
    async def read() -> None:
        async for _ in client.generate(request("cancel-me")):
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.3)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(until, lambda: is_idle(served))


async def test_a_replicas_refusal_arrives_as_itself(client: RayEngineClient) -> None:
    with pytest.raises(RequestRefused) as caught:
        async for _ in client.generate(replace(request("too-long"), prompt_token_ids=(7,) * 3000)):
            pass
    assert type(caught.value) is RequestRefused
    assert caught.value.message
    assert "Traceback" not in str(caught.value)


async def test_status_of_every_replica(client: RayEngineClient) -> None:
    statuses = await client.status()
    assert len({status.replica_id for status in statuses}) == len({status.pid for status in statuses}) == REPLICAS
    assert {status.block_tokens for status in statuses} == {16}


def test_metrics_are_exported(served: Served) -> None:
    complete(served, prompt="metrics")
    wanted = ["kv_blocks", "prefix_cache_queries_total", "time_to_first_token_seconds_count", "num_requests_running"]

    def exported() -> bool:
        text = httpx.get(served.metrics_url).text
        return all(f"ray_kvatlas_{name}" in text for name in wanted)

    assert until(exported, 40.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_after_sending_its_body_apart_is_noticed(served: Served, stream: bool) -> None:
    fields = {"model": served.model, "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    body = json.dumps(fields | {"user": "y" * 3000}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port or 80)) as client:
        client.sendall(head.encode())
        time.sleep(0.05)
        client.sendall(body)
        assert until(lambda: any(replica["running"] for replica in served.state()["replicas"]), 5)
    assert until(lambda: is_idle(served), 1.5), "the answer is computed to its end"
