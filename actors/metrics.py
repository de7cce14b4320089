"""Metrics of one replica, exported through Ray (which prefixes `ray_` and appends `_total` to counters).

Names and units follow vLLM's where both measure the same. Tokens and blocks are plain totals; rates belong into
queries. Cluster hit rate = rate(prefix_cache_hits) / rate(prefix_cache_queries), both in tokens, both counted once per
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from actors.meters import Meters
from actors.pool_metrics import PoolMetrics
from kvpool import PoolStats

_TTFT_BOUNDARIES = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]
_TOKEN_BOUNDARIES = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_REQUEST_BOUNDARIES = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800]


class ReplicaMetrics(Protocol):
    """What a replica reports."""

    def looked_up(self, queried_tokens: int, hit_tokens: int) -> None:
        """A request was admitted."""

    def first_token(self, seconds: float) -> None:
        """Time from arrival at the replica to the first token."""

    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the previous ones."""

    def finished(self, reason: str, seconds: float, generated_tokens: int) -> None:
        """A request ended: stop, length, abort (its client left), overload or error."""

    def levels(self, pool: str, stats: PoolStats, running: int, waiting: int, preemptions: int) -> None:
        """Current levels and totals; `stats` is one snapshot of the pool named `pool`. `preemptions` is a total."""

    def published(self, report: Mapping[str, Any]) -> None:
        """How the pool's publication does: `PublisherStats` as a mapping, totals and levels."""


class RayMetrics:
    """`ReplicaMetrics` over ray.util.metrics, tagged with the model's name and the replica's id."""

    def __init__(self, model: str, replica_id: str) -> None:
        self._meters = meters = Meters({"model": model, "replica_id": replica_id})
        counter, gauge, histogram = meters.counter, meters.gauge, meters.histogram
        self._pool = PoolMetrics(meters)
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the pool, once per request.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the pool and not computed again.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._finished = counter("requests_finished", "Requests ended, by reason.", "reason")
        self._preemptions = counter("preemptions", "Running requests that gave their blocks up for an older one.")
        self._running = gauge("num_requests_running", "Requests computed together now.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting for a place or for blocks.")
        self._ttft = histogram(
            "time_to_first_token_seconds", "Arrival at the replica to first token.", _TTFT_BOUNDARIES
        )
        self._itl = histogram("inter_token_latency_seconds", "Between tokens of one request.", _TOKEN_BOUNDARIES)
        self._e2e = histogram(
            "e2e_request_latency_seconds", "Arrival at the replica to last token.", _REQUEST_BOUNDARIES
        )
        self._published = gauge("directory_published_blocks", "Blocks of the pool that the directory lists.")
        self._publish_lag = gauge(
            "directory_publish_lag_seconds", "For how long the directory has been behind the pool."
        )
        self._refused = counter("directory_refused_writes", "Writes that the directory refused, by reason.", "reason")
        self._sessions = counter("directory_sessions", "Times the pool was announced whole to the directory.")
        self._publish_failures = counter("directory_publish_failures", "Times the publication was interrupted.")

    def looked_up(self, queried_tokens: int, hit_tokens: int) -> None:
        self._queries.inc(queried_tokens)
        if hit_tokens:
            self._hits.inc(hit_tokens)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self._itl.observe(seconds / count)

    def finished(self, reason: str, seconds: float, generated_tokens: int) -> None:
        self._finished.inc(tags={"reason": reason})
        if generated_tokens:
            self._generated.inc(generated_tokens)
        if reason in ("stop", "length"):
            self._e2e.observe(seconds)

    def levels(self, pool: str, stats: PoolStats, running: int, waiting: int, preemptions: int) -> None:
        self._pool.report(pool, stats)
        self._running.set(running)
        self._waiting.set(waiting)
        self._meters.raise_to(self._preemptions, preemptions)

    def published(self, report: Mapping[str, Any]) -> None:
        self._published.set(report["published_blocks"])
        self._publish_lag.set(report["lag_s"])
        self._meters.raise_to(self._sessions, report["sessions"])
        self._meters.raise_to(self._publish_failures, report["failures"])
        for reason, total in report["refused"].items():
            self._meters.raise_to(self._refused, total, reason=reason)
