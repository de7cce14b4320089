"""Metrics of one process's router, exported through Ray (which prefixes `ray_` and appends `_total` to counters).

Tokens are plain totals, all four counted at the same moment, once per request, so that they may be divided by each other:
predicted hit rate = predicted / queried, measured hit rate = measured / queried; phantom is what was predicted and not found.

Limits: Ray refuses to increment a counter by 0, so a counter shows up in a scrape with its first increment. Gauges are there
from the first report on.
"""

from __future__ import annotations

from typing import Final, Protocol

from ray.util.metrics import Counter, Gauge, Histogram

from router.claims import ClaimOutcome
from router.decision import Outcome
from router.directory_state import STATES, DirectoryState

_DECISION_BOUNDARIES: Final = [2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0]
_CLAIM_BOUNDARIES: Final = [5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.25, 0.5]


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


class SharingMetrics(Protocol):
    """What is reported of bookings shared between routers, and of claims. May raise: the caller does not care."""

    def shared(self, routers: int, bookings: int, sent: int, received: int, dropped: int) -> None:
        """Current levels: other routers followed, bookings of theirs known here. The last three are totals of changes."""

    def claimed(self, outcome: ClaimOutcome, seconds: float) -> None:
        """A cold prefix was claimed or waited for, which took this long; once per cold request."""


class RayRouterMetrics:
    """`RouterMetrics` and `SharingMetrics` over ray.util.metrics, tagged with the model's name.

    `levels` and `shared` are for one thread at a time.
    """

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
        self._phantom = counter(
            "router_phantom_tokens", "Prompt tokens that the directory listed and that were not cached."
        )
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
        self._peers = gauge("router_peers", "Other routers whose bookings are followed.")
        self._remote = gauge("router_remote_bookings", "Requests in flight that other routers told of.")
        self._sent = counter("router_booking_changes_sent", "Changes of bookings told to other routers.")
        self._received = counter("router_booking_changes_received", "Changes of bookings that other routers told.")
        self._dropped = counter(
            "router_booking_changes_dropped", "Changes not told one by one, and bookings forgotten with their router."
        )
        self._claims = counter("router_claims", "Requests with a cold prefix, by how their claim came out.", "outcome")

        def histogram(name: str, text: str, boundaries: list[float]) -> Histogram:
            metric = Histogram(f"kvatlas_{name}", text, boundaries=boundaries, tag_keys=keys)
            metric.set_default_tags(tags)
            return metric

        self._decision = histogram("router_decision_seconds", "Time to decide.", _DECISION_BOUNDARIES)
        self._held_up = histogram("router_claim_seconds", "Time a cold request was held up.", _CLAIM_BOUNDARIES)
        self._counted: dict[Counter, int] = {}

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
        self._count_up({self._resyncs: resyncs, self._gaps: gaps})

    def shared(self, routers: int, bookings: int, sent: int, received: int, dropped: int) -> None:
        self._peers.set(routers)
        self._remote.set(bookings)
        self._count_up({self._sent: sent, self._received: received, self._dropped: dropped})

    def claimed(self, outcome: ClaimOutcome, seconds: float) -> None:
        self._claims.inc(tags={"outcome": outcome})
        self._held_up.observe(seconds)

    def _count_up(self, totals: dict[Counter, int]) -> None:
        """Brings each counter up to its total."""
        for counter, total in totals.items():
            more = total - self._counted.get(counter, 0)
            if more > 0:
                counter.inc(more)
                self._counted[counter] = total
