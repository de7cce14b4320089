"""A replica that follows a script: no model, no pool, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from actors.errors import ReplicaFailed
from actors.request import Admitted, Delta, Event, FinishReason, GenerateRequest, TokenLogprob
from actors.status import ReplicaStatus

READY = ReplicaStatus(
    replica_id="r0",
    pid=1,
    model="tiny",
    mode="exact",
    fingerprint="ab" * 32,
    kv_dtype="float32",
    block_tokens=16,
    capacity_blocks=8,
    blocks={"free": 8},
    held_blocks=0,
    running=0,
    waiting=0,
    prefix_queried_tokens=0,
    prefix_hit_tokens=0,
    max_model_len=128,
    asyncio_tasks=3,
    integrity="",
    stalled_s=0.0,
    load_s={"load": 0.1},
    load_bytes={"load": 1000},
    publisher={"state": "open", "published_blocks": 0, "lag_s": 0.0},
)

ROUTING: dict[str, Any] = {
    "policy": "cost",
    "directory": {
        "state": "live",
        "lag_s": 0.004,
        "lag_entries": 0,
        "resyncs": 1,
        "gaps": 0,
        "digest_mismatches": 0,
        "pools": [
            {
                "pool": "p0",
                "state": "live",
                "whole": True,
                "key_blocks": 5,
                "seq": 9,
                "age_s": 0.1,
                "replica_ids": ["r0"],
            }
        ],
    },
    "decisions": {"prefix_hit": 6, "no_prefix": 3, "load_override": 1, "fallback": 0},
    "queried_tokens": 4000,
    "predicted_tokens": 2100,
    "measured_tokens": 2000,
    "phantom_tokens": 100,
    "bookings": 0,
    "retries": 0,
}
"""What the router of one healthy replica tells."""

CLEAN_CHECK: dict[str, Any] = {
    "pool": "p0",
    "replica_ids": ["r0"],
    "pool_blocks": 5,
    "places": [
        {"place": "directory", "missing": 0, "phantom": 0, "examples": []},
        {"place": "i0", "missing": 0, "phantom": 0, "examples": []},
    ],
}
"""What a comparison without a difference tells of the pool of `ROUTING` and the mirror of router i0."""

EXPLAINED: dict[str, Any] = {
    "policy": "cost",
    "outcome": "prefix_hit",
    "reason": "longest cached prefix",
    "replica_id": "r0",
    "predicted_tokens": 48,
    "score_unit": "s",
    "prompt_tokens": 60,
    "output_tokens": 16,
    "candidates": [
        {
            "replica_id": "r0",
            "pool": "p0",
            "pool_seq": 9,
            "matched_tokens": 48.0,
            "promised_tokens": 0.0,
            "cached_tokens": 48,
            "queued_tokens": 1200,
            "running_requests": 2,
            "prefill_tokens_per_s": 1000.0,
            "queue_s": 1.2,
            "score": 1.25,
        },
        {
            "replica_id": "r9",
            "pool": None,
            "pool_seq": None,
            "matched_tokens": None,
            "promised_tokens": None,
            "cached_tokens": 0,
            "queued_tokens": 0,
            "running_requests": 0,
            "prefill_tokens_per_s": 0.0,
            "queue_s": None,
            "score": None,
        },
    ],
    "not_in_directory": ["r9"],
    "directory": {"state": "live", "lag_s": 0.004, "lag_entries": 0, "resyncs": 1, "gaps": 0, "problem": ""},
}
"""What the router of `ROUTING` tells of a decision; no pool speaks for r9."""

_STEP_THREAD_DIED = ReplicaFailed("the step thread died in /some/path")


@dataclass(frozen=True, slots=True)
class Script:
    """What the replica does with one request.

    It waits `admit_delay_s`, raises `refusal` or admits, then sends `deltas` with `delay_s` before each. After
    `fail_after` deltas it raises `failure`. `endless` repeats the deltas for ever, `max_tokens` or not.
    `finish_reason` None leaves the stream without an end. `readmissions` follow the first `Admitted`, as when a replica died
    before its first token. Who asks for log probabilities gets `logprob` for every token, and as alternatives the ids from 0
    on, each less likely by one.
    """

    deltas: tuple[tuple[str, tuple[int, ...]], ...] = (("Hello", (1,)), (" world", (2,)))
    finish_reason: FinishReason | None = "stop"
    stop_reason: str | int | None = None
    replica_id: str = "r0"
    cached_tokens: int = 0
    route: str = ""
    readmissions: tuple[Admitted, ...] = ()
    admit_delay_s: float = 0.0
    delay_s: float = 0.0
    refusal: BaseException | None = None
    fail_after: int | None = None
    failure: BaseException = _STEP_THREAD_DIED
    endless: bool = False
    logprob: float = -0.5

    @staticmethod
    def of(*texts: str) -> Script:
        """One token and one delta per text."""
        return Script(deltas=tuple((text, (index,)) for index, text in enumerate(texts)))

    def but(self, **changes: object) -> Script:
        """This script with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _logprobs(request: GenerateRequest, script: Script, ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    count = request.sampling.logprobs
    if count is None:
        return ()
    top = tuple((other, script.logprob - other) for other in range(count))
    return tuple(TokenLogprob(script.logprob, top) for _ in ids)


class FakeEngine:
    """An `EngineClient`. `script` is one script for all requests or a function of the request."""

    def __init__(self, script: Script | Callable[[GenerateRequest], Script] = Script()) -> None:
        self.script = script
        self.statuses = [READY]
        self.status_delay_s = 0.0
        self.report: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] | Exception = []
        self.check_delay_s = 0.0
        self.explanation: dict[str, Any] | Exception = EXPLAINED
        self.explained: list[GenerateRequest] = []
        self.requests: list[GenerateRequest] = []
        self.open_streams = 0
        self.closed: list[str] = []
        self.finished: list[str] = []
        self.deltas_sent = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """See `EngineClient`. Counts the stream as open from its first step to its end, however that comes."""
        self.requests.append(request)
        self.open_streams += 1
        try:
            async for event in self._play(request, self.script if isinstance(self.script, Script) else None):
                yield event
            self.finished.append(request.request_id)
        finally:
            self.open_streams -= 1
            self.closed.append(request.request_id)

    async def _play(self, request: GenerateRequest, script: Script | None) -> AsyncGenerator[Event]:
        if script is None:
            assert callable(self.script)
            script = self.script(request)
        await asyncio.sleep(script.admit_delay_s)
        if script.refusal is not None:
            raise script.refusal
        yield Admitted(script.replica_id, len(request.prompt_token_ids), script.cached_tokens, script.route)
        for admitted in script.readmissions:
            yield admitted
        async for delta in self._deltas(request, script):
            self.deltas_sent += 1
            yield delta

    async def _deltas(self, request: GenerateRequest, script: Script) -> AsyncGenerator[Delta]:
        room = request.sampling.max_tokens
        sent = 0
        while True:
            for index, (text, ids) in enumerate(script.deltas):
                if sent == script.fail_after:
                    raise script.failure
                await asyncio.sleep(script.delay_s)
                sent += 1
                room -= len(ids)
                told = _logprobs(request, script, ids)
                if script.endless:
                    yield Delta(text, ids, logprobs=told)
                elif room <= 0 and script.finish_reason is not None:
                    yield Delta(text, ids, "length", logprobs=told)
                    return
                elif index + 1 < len(script.deltas) or script.finish_reason is None:
                    yield Delta(text, ids, logprobs=told)
                else:
                    yield Delta(text, ids, script.finish_reason, script.stop_reason, told)
            if sent == script.fail_after:
                raise script.failure
            if not script.endless:
                return

    async def status(self) -> list[ReplicaStatus]:
        """The statuses that the test set."""
        await asyncio.sleep(self.status_delay_s)
        return self.statuses

    def routing(self) -> dict[str, Any]:
        """The report that the test set; without one, this is a client without a router."""
        return self.report

    async def check_directory(self) -> list[dict[str, Any]]:
        """The records that the test set, or its error raised."""
        await asyncio.sleep(self.check_delay_s)
        if isinstance(self.checks, Exception):
            raise self.checks
        return self.checks

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """The explanation that the test set, or its error raised. The request counts as asked about, not as sent."""
        self.explained.append(request)
        if isinstance(self.explanation, Exception):
            raise self.explanation
        return self.explanation
