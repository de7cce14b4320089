"""A replica that is only late is shown as it was; a dead one is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.status_board import LATE_S, StatusBoard
from tests.fakes.engine import READY

R0, R1 = replace(READY, replica_id="r0"), replace(READY, replica_id="r1")
LATE, DEAD = TimeoutError(), RuntimeError("the actor died")


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.board = StatusBoard(lambda: self.now)

    def shown(self, *answers: Any) -> list[str]:
        return [status.replica_id for status in self.board.shown(answers)]


def test_answers_are_shown_by_id() -> None:
    assert Scene().shown(R1, R0) == ["r0", "r1"]


@pytest.mark.parametrize("answers", [(R1, LATE), (LATE, R1), (LATE, LATE), (LATE,)])
def test_one_that_is_late_is_shown_as_it_was_for_a_while(answers: tuple[Any, ...]) -> None:
    scene = Scene()
    scene.shown(R0, R1)
    scene.now += LATE_S
    assert scene.shown(*answers) == ["r0", "r1"]
    scene.now += 0.1
    assert scene.shown(*answers) == (["r1"] if R1 in answers else [])


def test_what_is_shown_for_a_late_one_does_not_count_as_heard() -> None:
    scene = Scene()
    scene.shown(R0)
    for _ in range(3):
        scene.now += LATE_S / 2
        last = scene.shown(LATE)
    assert last == []


@pytest.mark.parametrize("answers", [(R1, DEAD), (DEAD, R1)])
def test_a_dead_one_is_not_shown(answers: tuple[Any, ...]) -> None:
    scene = Scene()
    scene.shown(R0, R1)
    assert scene.shown(*answers) == ["r1"]


def test_all_dead() -> None:
    scene = Scene()
    scene.shown(R0, R1)
    assert scene.shown(DEAD, DEAD) == []
    assert scene.shown(DEAD) == []


def test_no_more_are_late_than_did_not_answer() -> None:
    scene = Scene()
    scene.shown(R0)
    scene.now += 1
    scene.shown(R1)
    assert scene.shown(LATE, DEAD) == ["r1"], "the one heard last"


def test_nothing_is_known_of_one_that_never_answered() -> None:
    assert Scene().shown(LATE) == []
