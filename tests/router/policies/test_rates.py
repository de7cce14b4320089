from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.rates import settled_rates
from router.route_config import RouteConfig

measured_rates = st.lists(st.just(0.0) | st.floats(1.0, 1e6), min_size=1, max_size=6)


@given(measured_rates, st.floats(0, 3), st.integers(0, 5), st.floats(1.001, 100))
def test_a_rate_that_rises_never_makes_a_replica_look_slower(
    measured: list[float], tolerance: float, which: int, factor: float
) -> None:
    config = RouteConfig(rate_tolerance=tolerance)
    which %= len(measured)
    before = settled_rates(np.array(measured), config)
    assert (before > 0).all()
    if measured[which]:
        raised = [rate * (factor if index == which else 1.0) for index, rate in enumerate(measured)]
        assert settled_rates(np.array(raised), config)[which] >= before[which] * (1 - 1e-9)


@given(measured_rates, st.floats(0, 3))
def test_they_keep_their_order_and_stay_between_the_slowest_and_the_fastest(
    measured: list[float], tolerance: float
) -> None:
    rates = settled_rates(np.array(measured), RouteConfig(rate_tolerance=tolerance))
    known = [rate for rate in measured if rate]
    if known:
        assert min(known) * (1 - 1e-9) <= rates.min()
        assert rates.max() <= max(known) * (1 + 1e-9)
        slow, fast = (measured.index(rate) for rate in (min(known), max(known)))
        assert rates[slow] <= rates[fast] * (1 + 1e-9)


def test_what_lies_within_the_tolerance_is_equal() -> None:
    rates = settled_rates(np.array([800.0, 1000.0, 1250.0]), RouteConfig(rate_tolerance=0.5))
    assert rates == pytest.approx([1000.0] * 3)


def test_what_lies_beyond_counts_from_its_edge() -> None:
    rates = settled_rates(np.array([100.0, 10_000.0]), RouteConfig(rate_tolerance=0.5))
    assert rates == pytest.approx([150.0, 10_000.0 / 1.5])


def test_without_tolerance_they_are_taken_at_their_word() -> None:
    assert settled_rates(np.array([100.0, 300.0]), RouteConfig(rate_tolerance=0.0)) == pytest.approx([100.0, 300.0])


def test_what_was_not_measured() -> None:
    config = RouteConfig(prefill_tokens_per_s=77.0)
    assert settled_rates(np.zeros(2), config).tolist() == [77.0, 77.0]
    assert settled_rates(np.array([0.0, 900.0, 900.0]), config) == pytest.approx([900.0] * 3)
