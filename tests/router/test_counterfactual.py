"""The decisions of a log, made again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from router.counterfactual import rerun
from router.decision import RouteDecision
from router.decision_record import Measured, Record, decided, from_line, to_line
from router.policy import POLICIES, decide
from router.route_config import PolicyName, RouteConfig
from router.view import RouteRequest, View
from tests.router.decisions import PROMPT_TOKENS, a_decision, a_ticket, a_view, unheard_added


def logged(*decisions: RouteDecision) -> list[Record]:
    """The records of requests r0, r1, ... as they come back from a file."""
    return [
        from_line(to_line(decided(float(number), a_ticket(f"r{number}"), decision)))
        for number, decision in enumerate(decisions)
    ]


def some_views(count: int, seed: int) -> list[View]:
    rng = random.Random(seed)
    return [
        a_view(
            cached=[rng.randrange(0, PROMPT_TOKENS, 16) for _ in range(3)],
            queued=[rng.randrange(0, 2000) for _ in range(3)],
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("policy", ["cost", "affinity", "least_load", "lmetric"])
def test_a_policy_agrees_with_itself(policy: PolicyName) -> None:
    records = logged(*(a_decision(policy, view) for view in some_views(50, 1)))
    (found,), _ = rerun(records, {policy: RouteConfig(policy)}, seed=5)
    assert found.decisions == 50
    assert found.changed == found.equal, "only what is equal to it may take its place"
    assert found.prompt_tokens == 50 * PROMPT_TOKENS
    if not found.changed:
        assert found.recorded == found.replayed


def test_what_another_policy_would_do_is_counted_in_tokens_and_seconds() -> None:
    view = a_view(
        cached=(0, 160, 32), queued=(0, 5000, 10)
    )  # the holder is busy: cost goes elsewhere, affinity does not
    records = logged(a_decision("cost", view))
    (found,), _ = rerun(records, {"affinity": RouteConfig("affinity")}, seed=1)
    assert (found.decisions, found.changed, found.equal) == (1, 1, 0)
    yardstick = a_decision("cost", view)
    assert found.recorded.predicted_tokens == yardstick.predicted_tokens < 160
    assert found.replayed.predicted_tokens == 160
    terms = yardstick.terms
    for choices, place in ((found.recorded, yardstick.order[0]), (found.replayed, 1)):
        expected = terms["queue_s"][place] + terms["prefill_s"][place] + terms["decode_s"][place]
        assert choices.ttft_s == pytest.approx(expected)
        assert choices.cost_s == pytest.approx(yardstick.score[place])
    assert found.replayed.ttft_s > found.recorded.ttft_s + 1.0


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_is_cheaper_than_cost_by_the_terms_of_cost(seed: int) -> None:
    records = logged(*(a_decision("round_robin", view) for view in some_views(60, seed)))
    configs = {name: RouteConfig(name) for name in POLICIES}  # type: ignore[arg-type]
    runs, _ = rerun(records, configs, seed)
    told = {run.policy: run for run in runs}
    assert told.keys() == POLICIES.keys()
    slack = 60 * RouteConfig().tie_s
    for run in runs:
        assert told["cost"].replayed.cost_s <= run.replayed.cost_s + slack
        assert told["affinity"].replayed.predicted_tokens >= run.replayed.predicted_tokens
        assert run.recorded == told["cost"].recorded
    assert told["cost"].replayed.cost_s < told["cost"].recorded.cost_s


def test_an_option_changes_what_is_decided() -> None:
    view = a_view(cached=(0, 160, 0), queued=(0, 200, 0))
    records = logged(a_decision("cost", view))
    configs = {"as it was": RouteConfig(), "bold": RouteConfig(recompute_weight=0.0)}
    (same, bold), _ = rerun(records, configs, seed=1)
    assert same.changed == 0
    assert (bold.changed, bold.replayed.predicted_tokens) == (1, 0)


def test_fallbacks_and_unknown_choices_are_left_out_and_counted() -> None:
    scored = a_decision()
    fallback = RouteDecision("least_load", "fallback", "no directory", scored.view, (0, 1, 2), scored.score, {})
    taken_by_an_unknown_one = unheard_added(scored, "x").accepted_by("x")
    records = logged(fallback, taken_by_an_unknown_one, unheard_added(scored, "x"))
    (found,), _ = rerun(records, {"cost": RouteConfig()}, seed=1)
    assert (found.decisions, found.fallbacks, found.unscored, found.changed) == (1, 1, 1, 0)


def test_turns_are_those_of_the_log() -> None:
    records = logged(*(a_decision("cost") for _ in range(6)))
    with_measurements: list[Record] = []
    for number, record in enumerate(records):
        with_measurements += [record, Measured(float(number), f"r{number}", "b", 0, None)]
    for sequence in (records, with_measurements):
        (found,), _ = rerun(sequence, {"round_robin": RouteConfig("round_robin")}, seed=1)
        assert found.changed == 4, "each of three replicas has its turn twice"


def test_chance_is_that_of_the_seed() -> None:
    equal = a_view(cached=(0, 0, 0), queued=(0, 0, 0))
    records = logged(*(a_decision("least_load", equal) for _ in range(40)))

    def told(seed: int) -> dict[str, object]:
        (found,), _ = rerun(records, {"power_of_two": RouteConfig("power_of_two")}, seed)
        return found.told()

    assert told(1) == told(1)
    assert len({str(told(seed)) for seed in range(8)}) > 1


def measured(request_id: str, replica_id: str, cached_tokens: int, ttft_s: float | None) -> Measured:
    return Measured(9.0, request_id, replica_id, cached_tokens, ttft_s)


def test_what_was_measured_is_told_of_the_same_requests() -> None:
    records: Sequence[Record] = [
        *logged(*(a_decision() for _ in range(4))),
        measured("r0", "b", 160, 0.5),
        measured("r1", "b", 100, None),
        measured("r2", "c", 0, 4.0),  # another one took it
        measured("of a log that is lost", "b", 0, 4.0),
    ]
    _, reality = rerun(records, {"cost": RouteConfig()}, seed=1)
    assert reality.told() == {
        "requests": 2,
        "predicted_tokens": 320,
        "cached_tokens": 260,
        "ttft_mean_s": 0.5,
    }


def test_of_a_request_decided_twice_the_last_decision_stands() -> None:
    first, second = a_decision(), a_decision("cost", a_view(cached=(0, 96, 0), queued=(0, 0, 0)))
    records: list[Record] = [
        decided(1.0, a_ticket(), first),
        decided(2.0, a_ticket(), second),
        measured("r", "b", 96, 0.1),
    ]
    (found,), reality = rerun(records, {"cost": RouteConfig()}, seed=1)
    assert found.decisions == 2
    assert (reality.requests, reality.predicted_tokens) == (1, 96)


def test_nothing_is_null_not_zero() -> None:
    (found,), reality = rerun([], {"cost": RouteConfig()}, seed=1)
    told = found.told()
    assert told["recorded"] == {"predicted_tokens": 0, "ttft_mean_s": None, "cost_mean_s": None}
    assert reality.told()["ttft_mean_s"] is None


def test_the_views_of_these_tests_make_cost_choose() -> None:
    chosen = {
        decide(RouteRequest(PROMPT_TOKENS, 20), view, RouteConfig(), random.Random(1)).replica_id
        for view in some_views(50, 1)
    }
    assert len(chosen) == 3
