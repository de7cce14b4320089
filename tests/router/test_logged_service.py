"""What the log is told of a request, from its decision to its first token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.decision_log import DecisionLog, Reading
from router.decision_record import Decided, Measured, Record
from router.logged_service import LoggedRouteService
from router.route_config import RouteConfig
from tests.router.scene import BLOCK_TOKENS, FRESH_S, Recorder, Scene, keys

UNIX = 1_700_000_000.0


class Logged(Scene):
    """A scene whose service has a log."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.log = DecisionLog(path)
        self.path = path
        self.service = LoggedRouteService(
            self.mirror,
            RouteConfig(tie_s=0.001),
            block_tokens=BLOCK_TOKENS,
            rng=random.Random(1),
            metrics=Recorder(),
            fresh_s=FRESH_S,
            connected=lambda: True,
            log=self.log,
            clock=lambda: self.now,
            unix_clock=lambda: UNIX + self.now,
        )

    def records(self) -> list[Record]:
        self.log.close()
        return list(Reading(self.path))


@pytest.fixture
def scene(tmp_path: Path) -> Logged:
    built = Logged(tmp_path / "decisions.jsonl")
    built.hear("r0", held=[1, 2, 3])
    built.hear("r1")
    return built


def kinds(records: Sequence[Record]) -> list[str]:
    return [type(record).__name__ for record in records]


def test_a_request_has_two_records(scene: Logged) -> None:
    with scene.service.ticket("a", keys(1, 2, 3, 4), 70, 10, session="s") as ticket:
        scene.now += 0.25
        assert scene.route("a") == "r0"
        scene.now += 0.5
        ticket.admitted("r0", 32)
        scene.now += 0.25
        ticket.started()
    decided, measured = scene.records()
    assert isinstance(decided, Decided)
    assert (decided.time_s, decided.request_id) == (UNIX + 100.25, "a")
    assert (decided.prompt_tokens, decided.output_tokens) == (70, 10)
    assert (decided.replica_id, decided.predicted_tokens, decided.policy) == ("r0", 48, "cost")
    assert list(decided.view.replica_ids) == ["r0", "r1"]
    assert decided.view.cached_tokens.tolist() == [48, 0]
    assert decided.prefix == keys(1)[0].hex()
    assert decided.session
    assert measured == Measured(UNIX + 101.0, "a", "r0", 32, 1.0)


def test_a_candidate_that_no_pool_speaks_for_is_named(scene: Logged) -> None:
    with scene.service.ticket("a", keys(1), 20, 10):
        scene.route("a", ["r0", "r1", "r9"])
    (decided,) = scene.records()
    assert isinstance(decided, Decided)
    assert decided.unheard == ("r9",)


def test_who_took_it_is_told_by_the_measurement(scene: Logged) -> None:
    with scene.service.ticket("a", keys(1, 2), 40, 10) as ticket:
        assert scene.route("a") == "r0"
        ticket.admitted("r1", 0)
        ticket.started()
    decided, measured = scene.records()
    assert isinstance(decided, Decided)
    assert isinstance(measured, Measured)
    assert (decided.replica_id, measured.replica_id) == ("r0", "r1")


def test_one_that_ends_without_a_token_has_no_time(scene: Logged) -> None:
    with scene.service.ticket("a", keys(1), 20, 10) as ticket:
        scene.route("a")
        ticket.admitted("r0", 16)
    _, measured = scene.records()
    assert measured == Measured(UNIX + 100.0, "a", "r0", 16, None)


def test_one_that_nobody_took_is_only_decided(scene: Logged) -> None:
    with scene.service.ticket("a", keys(1), 20, 10):
        scene.route("a")
    with scene.service.ticket("never asked", keys(1), 20, 10):
        pass
    assert kinds(scene.records()) == ["Decided"]


def test_a_retry_is_decided_again_and_measured_once(scene: Logged) -> None:
    with scene.service.ticket("a", keys(1), 20, 10) as ticket:
        scene.route("a")
        ticket.admitted("r0", 16)
        ticket.retry()
        scene.service.died("r0")
        scene.route("a", ["r1"])
        ticket.admitted("r1", 0)
        scene.now += 2.0
        ticket.started()
        ticket.started()
    records = scene.records()
    assert kinds(records) == ["Decided", "Decided", "Measured"]
    assert records[2] == Measured(UNIX + 102.0, "a", "r1", 0, 2.0)


def test_a_request_without_a_ticket_is_not_in_the_log(scene: Logged) -> None:
    scene.route("stranger")
    assert scene.records() == []


def test_a_ticket_used_after_its_end_says_nothing_of_its_successor(scene: Logged) -> None:
    first = scene.service.ticket("a", keys(1), 20, 10)
    first.close()
    with scene.service.ticket("a", keys(1), 20, 10) as second:
        scene.route("a")
        first.admitted("r1", 999)
        first.started()
        second.admitted("r0", 16)
        first.close()
        second.started()
    assert [record for record in scene.records() if isinstance(record, Measured)] == [
        Measured(UNIX + 100.0, "a", "r0", 16, 0.0)
    ]


def test_nothing_is_kept_of_requests_that_ended(scene: Logged) -> None:
    for number in range(50):
        with scene.service.ticket(f"r{number}", keys(1), 20, 10) as ticket:
            scene.route(f"r{number}")
            ticket.admitted("r0", 16)
            ticket.started()
    assert not scene.service._entries  # type: ignore[attr-defined]
    assert len(scene.records()) == 100


def test_the_report_tells_of_the_log(scene: Logged) -> None:
    report = scene.service.report()
    assert report["decision_log"]["path"].endswith("decisions.jsonl")
    assert report["policy"] == "cost"
    scene.log.close()


def test_a_log_that_fails_costs_no_request(scene: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: Record) -> None:
        raise OSError("no space")

    monkeypatch.setattr(scene.log, "put", fail)
    with scene.service.ticket("a", keys(1, 2), 40, 10) as ticket:
        assert scene.route("a") == "r0"
        ticket.admitted("r0", 32)
        ticket.started()
    assert scene.service.report()["measured_tokens"] == 32
    scene.log.close()
