"""Metrics of one process's router, exported through Ray (which prefixes `ray_` and appends `_total` to counters).

Tokens are plain totals, all four counted at the same moment, once per request, so that they may be divided by each other:
predicted hit rate = predicted / queried, measured hit rate = measured / queried; phantom is what was predicted and not found.

Limits: Ray refuses to increment a counter by 0, so a counter shows up in a scrape with its first increment. Gauges are there
from the first report on.
"""

from __future__ import annotations

from typing import Final, Protocol

from ray.util.metrics import Counter, Gauge, Histogram

from router.decision import Outcome
from router.directory_state import STATES, DirectoryState

_DECISION_BOUNDARIES: Final = [2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0]


class RouterMetrics(Protocol):
    """What a router reports. May raise: the caller does not care."""

    def decided(self, seconds: float) -> None:
        """A decision took this long. A request that is decided again counts again."""

    def routed(self, outcome: Outcome) -> None:
        """A request was routed; once per request, by the decision that stood."""

    def looked_up(self, queried_tokens: int, predicted_tokens: int, measured_tokens: int, phantom_tokens: int) -> None:
        """What was predicted of a request, and what the replica measured; once per request."""

    def retried(self) -> None:
        """A request is sent again, because its replica died before the first token."""

    def levels(self, bookings: int, state: DirectoryState, lag_s: float, resyncs: int, gaps: int) -> None:
        """Current levels. `resyncs` and `gaps` are totals."""


class RayRouterMetrics:
    """`RouterMetrics` over ray.util.metrics, tagged with the model's name. `levels` is for one thread at a time."""

    def __init__(self, model: str) -> None:
        tags = {"model": model}
        keys = tuple(tags)

        def counter(name: str, text: str, *extra: str) -> Counter:
            metric = Counter(f"kvatlas_{name}", text, tag_keys=keys + extra)
            metric.set_default_tags(tags)
            return metric

        def gauge(name: str, text: str, *extra: str) -> Gauge:
            metric = Gauge(f"kvatlas_{name}", text, tag_keys=keys + extra)
            metric.set_default_tags(tags)
            return metric

        self._requests = counter("router_requests", "Requests routed, by outcome.", "outcome")
        self._queried = counter("router_queried_tokens", "Prompt tokens of the requests routed.")
        self._predicted = counter(
            "router_predicted_tokens", "Prompt tokens expected to be cached where they were sent."
        )
        self._measured = counter("router_measured_tokens", "Prompt tokens that were cached there.")
        self._phantom = counter("router_phantom_tokens", "Prompt tokens that were expected to be cached and were not.")
        self._retries = counter("router_retries", "Requests sent again because their replica died.")
        self._bookings = gauge("router_bookings", "Requests in flight that this router counts as load.")
        self._state = gauge(
            "directory_state", "1 for the present state of this process's view of the directory.", "state"
        )
        self._lag = gauge(
            "directory_lag_seconds", "Since this process's mirror was last at the end of the directory's log."
        )
        self._resyncs = counter("directory_resyncs", "Snapshots of a pool taken into the mirror.")
        self._gaps = counter("directory_gaps", "Missing batches, each of which made the mirror drop a pool's keys.")
        self._decision = Histogram(
            "kvatlas_router_decision_seconds", "Time to decide.", boundaries=_DECISION_BOUNDARIES, tag_keys=keys
        )
        self._decision.set_default_tags(tags)
        self._counted = {"resyncs": 0, "gaps": 0}

    def decided(self, seconds: float) -> None:
        self._decision.observe(seconds)

    def routed(self, outcome: Outcome) -> None:
        self._requests.inc(tags={"outcome": outcome})

    def looked_up(self, queried_tokens: int, predicted_tokens: int, measured_tokens: int, phantom_tokens: int) -> None:
        counts = {
            self._queried: queried_tokens,
            self._predicted: predicted_tokens,
            self._measured: measured_tokens,
            self._phantom: phantom_tokens,
        }
        for counter, tokens in counts.items():
            if tokens:
                counter.inc(tokens)

    def retried(self) -> None:
        self._retries.inc()

    def levels(self, bookings: int, state: DirectoryState, lag_s: float, resyncs: int, gaps: int) -> None:
        self._bookings.set(bookings)
        for name in STATES:
            self._state.set(float(name == state), tags={"state": name})
        self._lag.set(lag_s)
        for counter, key, total in ((self._resyncs, "resyncs", resyncs), (self._gaps, "gaps", gaps)):
            if total > self._counted[key]:
                counter.inc(total - self._counted[key])
                self._counted[key] = total
