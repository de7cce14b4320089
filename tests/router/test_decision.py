from __future__ import annotations

import json
import math
import string
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chooser import as_they_come
from router.decision import OUTCOMES, Outcome, RouteDecision, outcome_of
from router.view import View


def decision(cached: list[int], order: tuple[int, ...], outcome: Outcome = "prefix_hit") -> RouteDecision:
    columns = (np.array(cached), *(np.zeros(len(cached), np.int64),) * 3)
    view = View([f"r{index}" for index in range(len(cached))], *columns, np.ones(len(cached)))
    return RouteDecision("cost", outcome, "because", view, order, np.zeros(len(cached)), {})


def test_outcomes() -> None:
    assert get_args(Outcome) == OUTCOMES
    assert outcome_of(np.array([0, 0]), 1) == "no_prefix"
    assert outcome_of(np.array([16, 16]), 1) == "prefix_hit"
    assert outcome_of(np.array([16, 0]), 1) == "load_override"
    assert outcome_of(np.array([16, 8]), 1) == "load_override"


def test_what_was_decided_is_not_always_what_happens() -> None:
    first = decision([32, 16, 0], (0, 2, 1))
    assert first.accepted_by("r0") is first
    taken = first.accepted_by("r1")
    assert (taken.replica_id, taken.predicted_tokens, taken.outcome) == ("r1", 16, "load_override")
    assert taken.ranking == ["r1", "r0", "r2"]
    assert "first choice" in taken.reason
    other = replace(first, outcome="fallback").accepted_by("r2")
    assert (other.replica_id, other.outcome, other.reason) == ("r2", "fallback", "because")
    with pytest.raises(ValueError, match="r9"):
        first.accepted_by("r9")


def test_header() -> None:
    made = replace(decision([288], (0,)), reason="longest cached prefix")
    assert made.header() == "policy=cost; outcome=prefix_hit; predicted_tokens=288; reason=longest cached prefix"


@given(st.text())
def test_whatever_the_reason_the_header_is_legal_and_parses(reason: str) -> None:
    header = replace(decision([0], (0,)), reason=reason).header()
    assert set(header) <= set(string.printable) - set("\t\n\r\x0b\x0c")
    assert header.isascii()
    fields = dict(part.split("=", 1) for part in header.split("; ", 3))
    assert list(fields) == ["policy", "outcome", "predicted_tokens", "reason"]
    assert ";" not in fields["reason"]


def test_no_candidates_at_all() -> None:
    empty = as_they_come((), "error in the router")
    assert (empty.replica_id, empty.predicted_tokens, empty.ranking) == ("", 0, [])
    assert "outcome=fallback" in empty.header()
    assert empty.explain()["candidates"] == []


def test_what_was_not_scored_is_null() -> None:
    told = replace(decision([0, 0], (0, 1)), score=np.array([1.0, np.nan])).explain()
    assert [one["score"] for one in told["candidates"]] == [1.0, None]
    json.dumps(told, allow_nan=False)


def test_an_explanation_has_every_column_and_term_with_its_unit() -> None:
    made = decision([32, 16], (1, 0))
    made = replace(made, terms={"queue_s": np.array([0.5, math.inf])}, score_unit="s")
    told = json.loads(json.dumps(made.explain(), allow_nan=False))
    assert told["score_unit"] == "s"
    assert told["reuse_share"] is None
    first, second = told["candidates"]
    assert set(first) == {
        "replica_id",
        "cached_tokens",
        "queued_tokens",
        "running_requests",
        "waiting_requests",
        "free_tokens",
        "held_tokens",
        "prefill_tokens_per_s",
        "decode_interference_s",
        "queue_s",
        "score",
    }
    assert (first["replica_id"], first["cached_tokens"], first["queue_s"]) == ("r1", 16, None)
    assert (second["replica_id"], second["cached_tokens"], second["queue_s"]) == ("r0", 32, 0.5)
    assert first["decode_interference_s"] is None, "not known"
