"""Whatever a constraint raises ends its own sequence only."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from actors.contained import Contained
from actors.errors import ReplicaFailed, RequestRefused
from tests.fakes.scripted_constraint import ScriptedConstraint


class Broken:
    """Everything raises from the moment that `breaks` is asked for; it counts how often it was asked anything."""

    def __init__(self, breaks: str) -> None:
        self.breaks = breaks
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        if name not in {"ready", "failure", "done", "apply", "accept", "close"}:
            raise AttributeError(name)
        self.asked += 1
        if name == self.breaks:
            raise ValueError("lost my place")
        return {"ready": False, "failure": "", "done": False}.get(name, lambda *_: None)


@pytest.mark.parametrize("breaks", ["ready", "failure", "done", "apply", "accept"])
def test_one_that_breaks_is_ready_to_end_and_is_asked_no_more(breaks: str, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken(breaks)
    contained = Contained(broken)
    assert contained.ready is (breaks == "ready")
    with caplog.at_level(logging.ERROR):
        assert isinstance(contained.failure, ReplicaFailed) is (breaks in {"ready", "failure"})
        _ = contained.done
        contained.apply(torch.zeros(2))
        contained.accept(1)
    asked = broken.asked
    assert isinstance(contained.failure, ReplicaFailed)
    assert "ValueError: lost my place" in str(contained.failure)
    assert contained.ready
    assert not contained.done
    contained.apply(torch.zeros(2))
    contained.accept(1)
    assert broken.asked == asked
    assert len(caplog.records) == 1


def test_what_it_says_of_itself_is_the_clients() -> None:
    constraint = ScriptedConstraint([{0}])
    assert Contained(constraint).failure is None
    constraint.failure = "the grammar is too deep"
    failure = Contained(constraint).failure
    assert isinstance(failure, RequestRefused)
    assert str(failure) == "the grammar is too deep"


def test_one_that_has_ended_is_asked_for_no_mask() -> None:
    for change in ({"failure": "too deep"}, {"done": True}):
        constraint = ScriptedConstraint([{0}])
        vars(constraint).update(change)
        row = torch.zeros(3)
        Contained(constraint).apply(row)
        assert constraint.masks == 0
        assert row.tolist() == [0.0] * 3


def test_it_is_closed_once_also_when_broken_and_a_failing_close_is_swallowed(caplog: pytest.LogCaptureFixture) -> None:
    constraint = ScriptedConstraint([])  # which has no mask to give
    contained = Contained(constraint)
    with caplog.at_level(logging.CRITICAL):
        contained.apply(torch.zeros(1))
    assert isinstance(contained.failure, ReplicaFailed)
    for _ in range(3):
        contained.close()
    assert constraint.closed == 1
    Contained(Broken("close")).close()
