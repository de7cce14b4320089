"""Sends prompts to /v1/completions as streams, some at a time, and times what comes back.

Closed loop: `concurrency` clients, each sends its next prompt when its last answer is complete. Time to first token runs from
just before the request is sent to the first event that carries text or a finish reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `error` is empty when the answer was complete and had its usage. Times in seconds.

    `replica` and `route` are the answer's headers `x-kvatlas-replica` and `x-kvatlas-route`, as far as one came; else empty.
    """

    error: str
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    replica: str = ""
    route: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. `url` is the server's root; `model` empty takes the first that the server lists."""

    url: str
    model: str
    concurrency: int
    output_tokens: int
    timeout_s: float = 300.0


async def replay(load: Load, prompts: Sequence[str]) -> tuple[list[Outcome], float]:
    """Send every prompt. Returns the outcomes, in order of completion, and the seconds from first send to last answer."""
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    async with httpx.AsyncClient(base_url=load.url, timeout=load.timeout_s, limits=limits, trust_env=False) as client:
        model = load.model or await first_model(client)
        waiting: Iterator[str] = iter(prompts)
        outcomes: list[Outcome] = []

        async def work() -> None:
            for prompt in waiting:
                outcomes.append(await one(client, model, prompt, load.output_tokens))

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(work())
        return outcomes, time.perf_counter() - began


async def first_model(client: httpx.AsyncClient) -> str:
    """The first model that the server lists. Raises `httpx.HTTPError` or `ValueError`."""
    answer = await client.get("/v1/models")
    answer.raise_for_status()
    listed = answer.json().get("data") or []
    if not listed:
        raise ValueError("the server lists no model")
    return str(listed[0]["id"])


async def one(client: httpx.AsyncClient, model: str, prompt: str, output_tokens: int) -> Outcome:
    """Send one prompt and read its stream to the end. Raises nothing: what went wrong is in the outcome."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = 0.0
    replica = route = ""
    usage: dict[str, Any] = {}

    def failed(error: str) -> Outcome:
        return Outcome(error, replica=replica, route=route)

    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            replica = answer.headers.get("x-kvatlas-replica", "")
            route = answer.headers.get("x-kvatlas-route", "")
            if answer.status_code != 200:
                return failed(f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return failed(str(event["error"]))
                usage = event.get("usage") or usage
                if not first and any(_has_content(choice) for choice in event.get("choices", [])):
                    first = time.perf_counter()
    except (httpx.HTTPError, ValueError) as error:
        return failed(f"{type(error).__name__}: {error}")
    ended = time.perf_counter()
    if not usage or not first:
        return failed("the stream ended early")
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        error="",
        ttft_s=first - began,
        total_s=ended - began,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
        completion_tokens=usage["completion_tokens"],
        replica=replica,
        route=route,
    )


def _has_content(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("finish_reason"))
