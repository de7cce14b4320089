"""Runs: one load of one server, and a run for each of several routing policies on a server of its own.

All runs of a command send the same prompts in the same order, so they differ by the policy alone. A policy's server is
fresh: its pools are cold at the first request (`cached_blocks_at_start` says so). There is no warm-up, since a request that
warms anything would also move counters and the round robin. What the first requests pay once (connections) is part of
every run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.bench import counters
from cluster.bench.replay import Load, Outcome, first_model, replay
from cluster.bench.server import Command, serving
from cluster.bench.summary import by_replica, summarise
from cluster.errors import ServeFailed


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load. Without an admin key its own counts stay unknown; `model` empty takes the first that it lists.

    `replicas` is the least number of them whose counts are waited for.
    """

    url: str
    admin_key: str = field(default="", repr=False)
    model: str = ""
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What to send, and how it was made: `workload` names the source of the prompts, `seed` their order."""

    prompts: Sequence[str]
    workload: str
    concurrency: int
    output_tokens: int
    seed: int


def measure(target: Target, work: Work) -> dict[str, Any]:
    """Load `target` and report: figures from the responses, from the replicas' and from the router's counters.

    Raises `ServeFailed` when the server does not take part; failed requests are figures.
    """
    before = counters.look(target.url, target.admin_key, target.replicas)
    try:
        model, outcomes, seconds = asyncio.run(_send(target, work))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServeFailed(
            f"Cannot measure {target.url} ({error}): is the server running? `kvatlas status --url {target.url}`."
        ) from error
    after = counters.look(target.url, target.admin_key, target.replicas, frozenset(before.replicas))
    return {
        "policy": after.policy,
        **summarise(outcomes, seconds),
        **counters.difference(before, after),
        "replicas": len(before.replicas) or None,
        "pool_tokens": before.pool_tokens,
        "cached_blocks_at_start": before.cached_blocks,
        "model": model,
        "workload": work.workload,
        "concurrency": work.concurrency,
        "output_tokens": work.output_tokens,
        "seed": work.seed,
        "by_replica": by_replica(outcomes),
    }


async def _send(target: Target, work: Work) -> tuple[str, list[Outcome], float]:
    model = target.model
    if not model:
        async with httpx.AsyncClient(base_url=target.url, timeout=30.0, trust_env=False) as client:
            model = await first_model(client)
    outcomes, seconds = await replay(Load(target.url, model, work.concurrency, work.output_tokens), work.prompts)
    return model, outcomes, seconds


def measure_policies(
    policies: Sequence[str],
    command: Callable[[str], Command],
    replicas: int,
    work: Work,
    say: Callable[[str], None],
    limit_s: float,
) -> Iterator[dict[str, Any]]:
    """Yield the report of each policy, in order. `command` gives a policy's command line; `limit_s` bounds each start.

    Raises `ServeFailed` when a server does not come up. Close the iterator to stop early.
    """
    for policy in policies:
        say(f"{policy}: starting {replicas} replica{'' if replicas == 1 else 's'}")
        with serving(command(policy), replicas, os.environ, limit_s) as server:
            say(f"{policy}: sending {len(work.prompts)} requests, {work.concurrency} at a time")
            report = measure(Target(server.url, server.admin_key, replicas=replicas), work)
        if report["policy"] not in (policy, "unknown"):
            raise ServeFailed(
                f"The server routes by {report['policy']} although {policy} was asked for: see `kvatlas config`."
            )
        report["policy"] = policy
        say(
            f"{policy}: hit {report['hit']}, {report['rps']} requests/s, first token p50 {report['ttft_p50_s']} s, "
            f"p95 {report['ttft_p95_s']} s, {report['errors']} errors"
        )
        yield report
