from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest

from kvpool import Pool, Region, TidyReport, TidyThread

if TYPE_CHECKING:
    from tests.kvpool.conftest import Rig


class Passes:
    """Notes the reports of a thread, and lets a test wait for one."""

    def __init__(self) -> None:
        self.reports: list[TidyReport] = []
        self._came = threading.Condition()

    def __call__(self, report: TidyReport) -> None:
        with self._came:
            self.reports.append(report)
            self._came.notify_all()

    def wait_for(self, number: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.reports) >= number, timeout=20)


def test_what_a_dead_process_had_comes_back_by_itself(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    dead = Region.attach(rig.region.path)
    doomed = Pool.create(dead)
    table = doomed.table("doomed")
    assert doomed.allocate(table, 5)
    passes = Passes()
    thread = TidyThread(rig.pool, 0.01, on_report=passes)
    passes.wait_for(2)
    assert rig.pool.stats().blocks["mutable"] == 5  # it lives
    with caplog.at_level(logging.WARNING):
        doomed._forget_after_fork()
        dead.close()
        passes.wait_for(len(passes.reports) + 2)
    thread.close()
    (reclaimed,) = [record for report in passes.reports for record in report.reclaimed]
    assert reclaimed.blocks == {"doomed": tuple(sorted(table._words[8:13]))}
    assert "is dead: reclaimed 5 blocks: doomed [" in caplog.text
    assert rig.pool.stats().blocks["free"] == 8


def test_one_at_a_time_and_another_takes_over(rig: Rig) -> None:
    region = Region.attach(rig.region.path)
    pool = Pool.create(region)
    first, second = Passes(), Passes()
    one = TidyThread(rig.pool, 0.01, on_report=first)
    first.wait_for(1)
    two = TidyThread(pool, 0.01, on_report=second)
    first.wait_for(len(first.reports) + 5)
    assert second.reports == []
    one.close()
    second.wait_for(1)
    two.close()
    pool.close()
    region.close()


def test_a_pass_that_fails_is_not_the_last(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes()
    tidy, calls = rig.pool.tidy, []

    def failing() -> TidyReport:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("once")
        return tidy()

    monkeypatch.setattr(rig.pool, "tidy", failing)
    thread = TidyThread(rig.pool, 0.01, on_report=passes)
    passes.wait_for(1)
    assert thread.alive
    thread.close()
    thread.close()
    assert not thread.alive


def test_it_ends_with_its_pool(rig: Rig) -> None:
    thread = TidyThread(rig.pool, 0.01)
    rig.pool.close()
    thread._thread.join(20)
    assert not thread.alive
    thread.close()
    rig.region.close()


def test_a_period_is_a_time(rig: Rig) -> None:
    with pytest.raises(ValueError, match="a period is longer than 0 s, got 0"):
        TidyThread(rig.pool, 0)
