"""What is exported, without a cluster: Ray's metric classes are real where they check, and replaced where they would send."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from ray.util import metrics as ray_metrics

from router.claims import CLAIM_OUTCOMES
from router.decision import OUTCOMES
from router.directory_state import STATES, DirectoryState
from router.metrics import RayRouterMetrics
from router.mirror import Mirror
from router.route_config import RouteConfig
from router.service import RouteService

Told = dict[tuple[str, str], float]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Every value by (metric, its own tag): sums of counters, last of gauges, number of observations of histograms."""
    values: Told = {}

    def record(self: Any, value: float, tags: dict[str, str] | None = None) -> None:
        final = {**self._default_tags, **(tags or {})}
        assert set(final) == set(self._tag_keys)
        assert final.pop("model") == "m"
        key = (self._name, ",".join(final.values()))
        if isinstance(self, ray_metrics.Counter):
            values[key] = values.get(key, 0) + value
        else:
            values[key] = value if isinstance(self, ray_metrics.Gauge) else values.get(key, 0) + 1

    monkeypatch.setattr(ray_metrics.Metric, "_record", record)
    return values


def test_names_units_and_tags(told: Told) -> None:
    metrics = RayRouterMetrics("m")
    metrics.decided(0.0001)
    for outcome in OUTCOMES:
        metrics.routed(outcome)
    metrics.looked_up(100, 32, 16, 16)
    metrics.retried()
    metrics.levels(3, "live", 0.25, 2, 1)
    metrics.shared(2, 7, 30, 20, 10)
    for claim in CLAIM_OUTCOMES:
        metrics.claimed(claim, 0.002)
    wanted: Told = {
        ("kvatlas_router_peers", ""): 2,
        ("kvatlas_router_remote_bookings", ""): 7,
        ("kvatlas_router_booking_changes_sent", ""): 30,
        ("kvatlas_router_booking_changes_received", ""): 20,
        ("kvatlas_router_booking_changes_dropped", ""): 10,
        ("kvatlas_router_claim_seconds", ""): len(CLAIM_OUTCOMES),
        ("kvatlas_router_decision_seconds", ""): 1,
        ("kvatlas_router_queried_tokens", ""): 100,
        ("kvatlas_router_predicted_tokens", ""): 32,
        ("kvatlas_router_measured_tokens", ""): 16,
        ("kvatlas_router_phantom_tokens", ""): 16,
        ("kvatlas_router_retries", ""): 1,
        ("kvatlas_router_bookings", ""): 3,
        ("kvatlas_directory_lag_seconds", ""): 0.25,
        ("kvatlas_directory_resyncs", ""): 2,
        ("kvatlas_directory_gaps", ""): 1,
    }
    wanted.update({("kvatlas_router_requests", outcome): 1.0 for outcome in OUTCOMES})
    wanted.update({("kvatlas_router_claims", outcome): 1.0 for outcome in CLAIM_OUTCOMES})
    wanted.update({("kvatlas_directory_state", state): float(state == "live") for state in STATES})
    assert told == wanted


def test_nothing_is_counted_with_zero(told: Told) -> None:
    """Ray raises on it."""
    metrics = RayRouterMetrics("m")
    metrics.looked_up(10, 0, 0, 0)
    metrics.levels(0, "off", 0.0, 0, 0)
    metrics.shared(0, 0, 0, 0, 0)
    assert not [name for name, _ in told if name.startswith("kvatlas_router_booking_changes")]
    assert ("kvatlas_router_predicted_tokens", "") not in told
    assert told["kvatlas_router_bookings", ""] == 0


def test_totals_are_exported_as_what_was_added(told: Told) -> None:
    metrics = RayRouterMetrics("m")
    for resyncs, gaps in ((2, 0), (2, 1), (5, 1)):
        metrics.levels(0, "live", 0.0, resyncs, gaps)
        metrics.shared(1, 0, resyncs, gaps, 0)
    assert told["kvatlas_directory_resyncs", ""] == 5
    assert told["kvatlas_directory_gaps", ""] == 1
    assert told["kvatlas_router_booking_changes_sent", ""] == 5
    assert told["kvatlas_router_booking_changes_received", ""] == 1


@pytest.mark.parametrize("state", get_args(DirectoryState))
def test_one_state_at_a_time(told: Told, state: DirectoryState) -> None:
    metrics = RayRouterMetrics("m")
    for each in (*STATES, state):
        metrics.levels(0, each, 0.0, 0, 0)
    assert {name: told["kvatlas_directory_state", name] for name in STATES} == {
        name: float(name == state) for name in STATES
    }


def test_a_service_reports_through_them(told: Told) -> None:
    service = RouteService(
        Mirror(),
        RouteConfig(),
        block_tokens=16,
        clock=lambda: 5.0,
        rng=random.Random(1),
        metrics=RayRouterMetrics("m"),
        fresh_s=3.0,
        connected=lambda: True,
    )
    with service.ticket("q", [], 20, 5) as ticket:
        service.route("q", ["r0"])
        ticket.admitted("r0", 16)
    service.report_levels()
    assert told["kvatlas_router_requests", "fallback"] == 1
    assert told["kvatlas_router_measured_tokens", ""] == 16
    assert told["kvatlas_directory_state", "silent"] == 1
