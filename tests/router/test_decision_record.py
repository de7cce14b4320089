"""Records become lines and lines the same records."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from router.counterfactual import rerun
from router.decision import RouteDecision
from router.decision_record import Decided, MalformedRecord, Measured, decided, from_line, to_line
from router.policy import POLICIES, decide
from router.route_config import RouteConfig
from router.view import COLUMNS, RouteRequest, View
from tests.router.decisions import PROMPT_TOKENS, a_decision, a_ticket, a_view, unheard_added

MEASURED = Measured(12.5, "r", "b", 64, 0.25)


def same_view(one: View, other: View) -> bool:
    """Whether all columns agree, in values and kinds."""
    return (
        list(one.replica_ids) == list(other.replica_ids)
        and all(getattr(one, name).dtype == getattr(other, name).dtype for name in COLUMNS)
        and all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in COLUMNS)
        and (one.reuse_share == other.reuse_share or (math.isnan(one.reuse_share) and math.isnan(other.reuse_share)))
    )


def test_a_decision_comes_back_with_every_column() -> None:
    decision = a_decision()
    record = decided(12.5, a_ticket(session="chat 7"), decision)
    back = from_line(to_line(record))
    assert isinstance(back, Decided)
    assert (back.request_id, back.prompt_tokens, back.output_tokens) == ("r", PROMPT_TOKENS, 20)
    assert (back.policy, back.outcome, back.reason) == (decision.policy, decision.outcome, decision.reason)
    assert (back.replica_id, back.predicted_tokens) == (decision.replica_id, decision.predicted_tokens)
    assert same_view(back.view, decision.view)
    assert (back.session, back.prefix, back.unheard) == (record.session, record.prefix, ())


def test_the_same_policy_decides_the_same_from_the_line() -> None:
    decision = a_decision()
    back = from_line(to_line(decided(1.0, a_ticket(), decision)))
    assert isinstance(back, Decided)
    again = decide(RouteRequest(back.prompt_tokens, back.output_tokens), back.view, RouteConfig(), random.Random(3))
    assert again.ranking == decision.ranking
    assert np.allclose(again.score, decision.score, rtol=1e-5)


def test_candidates_that_were_not_scored_are_only_named() -> None:
    record = decided(1.0, a_ticket(), unheard_added(a_decision(), "x", "y"))
    assert list(record.view.replica_ids) == ["a", "b", "c"]
    assert record.unheard == ("x", "y")
    back = from_line(to_line(record))
    assert isinstance(back, Decided)
    assert back.unheard == ("x", "y")


def test_of_a_fallback_no_column_is_kept() -> None:
    empty = a_view([])
    fallback = RouteDecision("least_load", "fallback", "no directory", a_view(["a", "b"]), (1, 0), np.zeros(2), {})
    record = decided(1.0, a_ticket(), fallback)
    assert len(record.view) == len(empty) == 0
    assert (record.unheard, record.replica_id) == (("a", "b"), "b")
    assert from_line(to_line(record)) is not None


def test_what_is_not_a_number_is_null() -> None:
    view = replace(a_view(), decode_interference_s=np.array([0.02, np.nan, np.inf]))
    record = decided(1.0, a_ticket(), replace(a_decision(), view=view))
    told = json.loads(to_line(record))
    assert told["columns"]["decode_interference_s"] == [0.02, None, None]
    assert told["reuse_share"] is None
    back = from_line(to_line(record))
    assert isinstance(back, Decided)
    assert back.view.decode_interference_s.tolist() == pytest.approx([0.02, math.nan, math.nan], nan_ok=True)


def test_columns_that_nobody_gave_are_left_out() -> None:
    bare = json.loads(to_line(decided(1.0, a_ticket(), a_decision())))["columns"]
    assert not {"decode_interference_s", "waiting", "held_tokens"} & bare.keys()
    given = replace(a_view(), waiting=np.array([0, 2, 0]), decode_interference_s=np.full(3, 0.5))
    record = decided(1.0, a_ticket(), a_decision("cost", given))
    back = from_line(to_line(record))
    assert isinstance(back, Decided)
    assert same_view(back.view, given)


@pytest.mark.parametrize("value", [0.0, 1e-12, 0.02, 1.0, 123456.0, 999999.5, 1234567.0, 3.3e18, -7.125, 1e-300])
def test_floats_keep_six_digits(value: float) -> None:
    view = replace(a_view(), decode_interference_s=np.array([value, 0.0, 0.5]))
    told = json.loads(to_line(decided(1.0, a_ticket(), replace(a_decision(), view=view))))
    assert told["columns"]["decode_interference_s"] == pytest.approx([value, 0.0, 0.5], rel=5.1e-6, abs=0.0)


def test_a_session_is_hashed_and_a_prompt_is_not_there() -> None:
    line = to_line(decided(1.0, a_ticket(session="alice@example.org"), a_decision()))
    assert b"alice" not in line
    other = decided(1.0, a_ticket(session="bob"), a_decision())
    assert other.session != json.loads(line)["session"]


@pytest.mark.parametrize("ttft_s", [0.25, None])
def test_a_measurement_comes_back(ttft_s: float | None) -> None:
    measured = Measured(12.5, "r", "b", 64, ttft_s)
    line = to_line(measured)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert from_line(line) == measured


def test_any_request_id_stays_on_its_line() -> None:
    measured = Measured(1.0, 'a"\n\u2028b', "r", 0, None)
    assert to_line(measured).count(b"\n") == 1
    assert from_line(to_line(measured)) == measured


def test_a_column_of_a_later_version_is_passed_over() -> None:
    told = json.loads(to_line(decided(1.0, a_ticket(), a_decision())))
    told["columns"]["phase_of_moon"] = [1, 2, 3]
    told["mood"] = "good"
    back = from_line(json.dumps(told).encode())
    assert isinstance(back, Decided)
    assert same_view(back.view, a_decision().view)


def broken(**changes: Any) -> bytes:
    return json.dumps(json.loads(to_line(decided(1.0, a_ticket(), a_decision()))) | changes).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{",
        b"[]",
        b"null",
        b'{"kind": "measured"}',
        b'{"kind": "other"}',
        to_line(MEASURED)[:-20],
        broken(prompt_tokens="many"),
        broken(prompt_tokens=None),
        broken(columns={"replica_ids": ["a"]}),
        broken(columns=[]),
        broken(prefix="not hexadecimal"),
        broken(unheard=7),
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_record_is_said_to_be_none(line: bytes) -> None:
    with pytest.raises(MalformedRecord, match="not a line of a decision log"):
        from_line(line)


def test_columns_of_unequal_length_are_no_record() -> None:
    told = json.loads(to_line(decided(1.0, a_ticket(), a_decision())))
    told["columns"]["running"].append(1)
    with pytest.raises(MalformedRecord):
        from_line(json.dumps(told).encode())


WILD: list[Any] = [
    None, True, -1, 0, 1, 0.5, -0.5, 1e-300, 1e30, 10**18, 10**25, -(2**63), math.nan, math.inf, -math.inf, 1e308,
    "", "1", "\ud800", [], [None, None, None], {},
]  # fmt: skip


def altered(told: Any, path: tuple[Any, ...], value: Any) -> bytes:
    """The record with `value` at `path`, as a line."""
    copy = json.loads(json.dumps(told))
    place = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(copy).encode()


def places(told: Any) -> list[tuple[Any, ...]]:
    """Every field, every column, and the first value of each."""
    found: list[tuple[Any, ...]] = [(name,) for name in told]
    for name in told.get("columns", {}):
        found += [("columns", name), ("columns", name, 0)]
    return found


FULL = replace(
    a_view(), waiting=np.array([1, 0, 2]), held_tokens=np.array([5, 6, 7]), decode_interference_s=np.full(3, 0.5)
)


@pytest.mark.parametrize("record", [decided(1.0, a_ticket(session="s"), a_decision("cost", FULL)), MEASURED])
def test_any_value_anywhere_is_refused_or_harmless(record: Decided | Measured) -> None:
    """Whatever a line says, it is no record or one that every policy decides on, in finite numbers and without a warning."""
    told = json.loads(to_line(record))
    configs = {name: RouteConfig(name) for name in POLICIES}  # type: ignore[arg-type]
    refused = taken = 0
    for path in places(told):
        for value in WILD:
            try:
                back = from_line(altered(told, path, value))
            except MalformedRecord:
                refused += 1
                continue
            taken += 1
            runs, reality = rerun([back, MEASURED], configs, seed=1)
            text = json.dumps([*(run.told() for run in runs), reality.told()], allow_nan=False)
            assert "-" not in re.sub(r"e-\d+", "", text), (path, value)
    assert refused > taken > 0


@pytest.mark.parametrize("name", sorted({*COLUMNS} - {"decode_interference_s"}))
def test_only_one_column_may_have_nothing_in_it(name: str) -> None:
    told = json.loads(to_line(decided(1.0, a_ticket(), a_decision("cost", FULL))))
    with pytest.raises(MalformedRecord):
        from_line(altered(told, ("columns", name), [None, None, None]))
    assert from_line(altered(told, ("columns", "decode_interference_s"), [None, None, None]))
