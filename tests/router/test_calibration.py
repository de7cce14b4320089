from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.calibration import Calibration
from router.route_config import RouteConfig

RATE, DECODE_S, FIXED_S = 1000.0, 0.02, 0.02
CONFIG = RouteConfig(prefill_tokens_per_s=RATE, decode_interference_s=DECODE_S)
ODD = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300]


def teach(
    calibration: Calibration,
    answers: int,
    *,
    seed: int,
    noise: float = 0.2,
    outliers: float = 0.0,
    slowness: Mapping[str, float] | None = None,
    speed: float = 1.0,
) -> None:
    """First tokens of replicas that compute 1,000 prompt tokens a second and lose 20 ms to each decode, with noise.

    `outliers`: share of answers that take 50 times as long. `slowness`: replicas and how much longer each takes.
    """
    rng = random.Random(seed)
    slowness = slowness or {"r0": 1.0}
    for _ in range(answers):
        queued, uncached, running = rng.choice([0, 0, rng.randint(0, 8000)]), rng.randint(100, 4000), rng.randint(0, 60)
        replica_id = rng.choice(sorted(slowness))
        expected_s = ((queued + uncached) / RATE + running * DECODE_S + FIXED_S) * slowness[replica_id] / speed
        late = 50.0 if rng.random() < outliers else 1.0
        calibration.note(replica_id, queued, uncached, running, expected_s * math.exp(rng.gauss(0, noise)) * late)


def learned(calibration: Calibration, replica_id: str = "r0") -> tuple[float, float]:
    rates = calibration.rates((replica_id,))
    return float(rates.prefill_tokens_per_s[0]), float(rates.decode_interference_s[0])


@pytest.mark.parametrize("rate_wrong", [0.5, 2.0])
@pytest.mark.parametrize("decode_wrong", [0.5, 2.0])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_what_begins_twice_wrong_is_right_after_fifty_answers(
    rate_wrong: float, decode_wrong: float, outliers: float, seed: int
) -> None:
    calibration = Calibration(
        RouteConfig(prefill_tokens_per_s=RATE * rate_wrong, decode_interference_s=DECODE_S * decode_wrong)
    )
    begun = learned(calibration)
    assert begun == pytest.approx((RATE * rate_wrong, DECODE_S * decode_wrong))
    teach(calibration, 50, seed=seed, outliers=outliers)
    rate, decode_s = learned(calibration)
    assert rate == pytest.approx(RATE, rel=0.2)
    assert decode_s == pytest.approx(DECODE_S, rel=0.6), "a fifth of the time is due to decodes, as much as the noise"
    teach(calibration, 450, seed=seed + 100, outliers=outliers)
    rate, decode_s = learned(calibration)
    assert rate == pytest.approx(RATE, rel=0.2)
    assert decode_s == pytest.approx(DECODE_S, rel=0.5)


def test_without_noise_it_is_right_to_a_percent() -> None:
    calibration = Calibration(RouteConfig(prefill_tokens_per_s=RATE * 2, decode_interference_s=DECODE_S / 2))
    teach(calibration, 300, seed=1, noise=0.0)
    rate, decode_s = learned(calibration)
    assert rate == pytest.approx(RATE, rel=0.02)
    assert decode_s == pytest.approx(DECODE_S, rel=0.05)


@pytest.mark.parametrize("wrong", [20.0, 0.05])
def test_what_begins_twenty_times_wrong_is_found_as_well(wrong: float) -> None:
    calibration = Calibration(RouteConfig(prefill_tokens_per_s=RATE * wrong, decode_interference_s=DECODE_S / wrong))
    teach(calibration, 200, seed=3)
    assert learned(calibration)[0] == pytest.approx(RATE, rel=0.25)


def test_one_straggler_moves_nothing_to_speak_of() -> None:
    calibration = Calibration(CONFIG)
    teach(calibration, 100, seed=4)
    before = learned(calibration)
    calibration.note("r0", 0, 1000, 10, 500.0)
    assert learned(calibration) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("speed", [4.0, 0.25])
def test_a_lasting_change_is_believed(speed: float) -> None:
    calibration = Calibration(CONFIG)
    teach(calibration, 200, seed=5)
    teach(calibration, 100, seed=6, speed=speed)
    assert learned(calibration)[0] == pytest.approx(RATE * speed, rel=0.3)


def test_a_slow_replica_gets_its_factor() -> None:
    calibration = Calibration(CONFIG)
    teach(calibration, 300, seed=7, slowness={"r0": 1.0, "r1": 1.0, "r2": 1.0, "slow": 3.0})
    rates = calibration.rates(("r0", "r1", "r2", "slow"))
    assert rates.prefill_tokens_per_s[:3] == pytest.approx([RATE] * 3, rel=0.2)
    assert rates.prefill_tokens_per_s[3] == pytest.approx(RATE / 3, rel=0.2)
    ratio = rates.decode_interference_s[3] / rates.decode_interference_s[:3]
    assert ratio == pytest.approx([3.0] * 3, rel=0.25)


def test_equal_replicas_are_found_to_be_equal() -> None:
    calibration = Calibration(CONFIG)
    ids = tuple(f"r{index}" for index in range(8))
    teach(calibration, 400, seed=8, slowness=dict.fromkeys(ids, 1.0))
    rates = calibration.rates(ids).prefill_tokens_per_s
    assert rates.max() / rates.min() < 1 + CONFIG.rate_tolerance


def test_one_replica_is_the_mean() -> None:
    calibration = Calibration(CONFIG)
    teach(calibration, 50, seed=9)
    assert calibration.report()["factors"] == {"r0": pytest.approx(1.0)}


def test_a_replica_that_has_not_answered_is_like_the_others() -> None:
    calibration = Calibration(RouteConfig(prefill_tokens_per_s=RATE / 2))
    teach(calibration, 100, seed=10)
    assert learned(calibration, "new") == pytest.approx(learned(calibration, "r0"))


class TestMeasured:
    """What the engines say of themselves, before and after answers have told."""

    def test_before_any_answer_it_stands(self) -> None:
        rates = Calibration(CONFIG).rates(("a", "b", "c"), np.array([500.0, 0.0, 2000.0]))
        assert rates.prefill_tokens_per_s == pytest.approx([500.0, 1000.0, 2000.0]), "the one between is the mean"
        assert rates.decode_interference_s == pytest.approx([DECODE_S] * 3)

    def test_nothing_measured_leaves_the_configured_rate(self) -> None:
        for nothing in (np.zeros(2), np.array([0.0, math.inf])):
            rates = Calibration(CONFIG).rates(("a", "b"), nothing)
            assert rates.prefill_tokens_per_s == pytest.approx([RATE] * 2)

    def test_it_is_where_learning_begins(self) -> None:
        calibration = Calibration(RouteConfig(prefill_tokens_per_s=10.0))
        calibration.rates(("r0",), np.array([RATE]))
        calibration.note("r0", 0, 1000, 0, 1.0)
        assert learned(calibration)[0] == pytest.approx(RATE, rel=0.1)

    def test_answers_outweigh_it(self) -> None:
        calibration = Calibration(CONFIG)
        teach(calibration, 200, seed=11, slowness={"r0": 1.0, "r1": 1.0})
        rates = calibration.rates(("r0", "r1", "new"), np.array([RATE * 2, RATE / 2, RATE * 2])).prefill_tokens_per_s
        assert rates[:2] == pytest.approx([RATE] * 2, rel=0.3)
        assert rates[2] == pytest.approx(RATE * 2), "it has not answered, so what it measured stands"


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("odd", ODD)
def test_numbers_that_no_request_has_are_ignored_or_survived(where: int, odd: float) -> None:
    calibration = Calibration(CONFIG)
    teach(calibration, 50, seed=12)
    before = learned(calibration)
    answer = [100.0, 1000.0, 5.0, 1.2]
    answer[where] = odd
    for _ in range(3):
        calibration.note("r0", answer[0], answer[1], answer[2], answer[3])
    assert learned(calibration) == pytest.approx(before, rel=0.3)
    teach(calibration, 200, seed=13)
    assert learned(calibration)[0] == pytest.approx(RATE, rel=0.25)


numbers = st.sampled_from(ODD) | st.floats(allow_nan=True, allow_infinity=True) | st.integers(-1, 10**6).map(float)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), numbers, numbers, numbers, numbers), max_size=40))
def test_whatever_it_is_told_rates_stay_positive_and_bounded(
    answers: list[tuple[str, float, float, float, float]],
) -> None:
    calibration = Calibration(CONFIG)
    for replica_id, *answer in answers:
        calibration.note(replica_id, *answer)
    rates = calibration.rates(("a", "b", "c", "d"), np.array([0.0, 500.0, 0.0, 0.0]))
    for column, begun in ((rates.prefill_tokens_per_s, RATE), (rates.decode_interference_s, DECODE_S)):
        assert np.isfinite(column).all()
        assert (column > begun / 1e6).all()
        assert (column < begun * 1e6).all()
    json.dumps(calibration.report(), allow_nan=False)


def test_nothing_winds_up_while_all_requests_look_alike() -> None:
    calibration = Calibration(CONFIG)
    rng = random.Random(14)
    for _ in range(3000):
        calibration.note("r0", 0, 1000, 10, 1.21 * math.exp(rng.gauss(0, 0.2)))
    rate, decode_s = learned(calibration)
    assert rate == pytest.approx(RATE, rel=0.3)
    assert DECODE_S / 5 < decode_s < DECODE_S * 5
    teach(calibration, 100, seed=15)
    assert learned(calibration) == pytest.approx((RATE, DECODE_S), rel=0.5)


class TestReuse:
    """How much of the prompts is found cached."""

    def test_it_begins_as_configured(self) -> None:
        assert Calibration(RouteConfig(reuse_share=0.7)).reuse_share == 0.7

    @pytest.mark.parametrize("begun", [0.0, 1.0])
    def test_it_is_learned(self, begun: float) -> None:
        calibration = Calibration(RouteConfig(reuse_share=begun))
        rng = random.Random(16)
        for _ in range(500):
            prompt = rng.randint(1, 8000)
            calibration.note_reuse(prompt, int(prompt * rng.uniform(0.2, 0.6)))
        assert calibration.reuse_share == pytest.approx(0.4, abs=0.1)

    def test_it_follows_a_change(self) -> None:
        calibration = Calibration(CONFIG)
        for cached in (0, 1000):
            for _ in range(1000):
                calibration.note_reuse(1000, cached)
        assert calibration.reuse_share > 0.85

    @given(st.lists(st.tuples(st.integers(-5, 100), st.integers(-5, 100))))
    def test_it_is_a_share_whatever_it_is_told(self, told: list[tuple[int, int]]) -> None:
        calibration = Calibration(CONFIG)
        for prompt_tokens, cached_tokens in told:
            calibration.note_reuse(prompt_tokens, cached_tokens)
        assert 0 <= calibration.reuse_share <= 1


def test_replicas_that_are_gone_are_forgotten() -> None:
    calibration = Calibration(CONFIG)
    teach(calibration, 200, seed=17, slowness={"r0": 1.0, "r1": 1.0, "slow": 3.0})
    ids = ("slow", "r0")
    before = calibration.rates(ids).prefill_tokens_per_s
    version = calibration.version
    calibration.keep_replicas(ids)
    assert calibration.version > version
    assert set(calibration.report()["factors"]) == set(ids)
    assert calibration.rates(ids).prefill_tokens_per_s == pytest.approx(before)
    calibration.keep_replicas(())
    assert calibration.report()["factors"] == {}
    assert learned(calibration, "slow") == pytest.approx(learned(calibration, "r0"))


@pytest.mark.parametrize("kind", [tuple, list])
def test_rates_of_the_same_candidates_follow_what_is_learned(kind: Callable[[list[str]], list[str]]) -> None:
    calibration = Calibration(CONFIG)
    ids = kind(["r0", "slow", "new"])
    first = calibration.rates(ids).prefill_tokens_per_s
    teach(calibration, 300, seed=18, slowness={"r0": 1.0, "slow": 3.0})
    second = calibration.rates(ids).prefill_tokens_per_s
    assert second[1] < second[2] < second[0]
    assert first.tolist() == pytest.approx([RATE] * 3), "columns handed out do not change"
    assert len(calibration.rates(()).prefill_tokens_per_s) == 0
