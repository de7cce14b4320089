"""Child processes of the pool benchmark: asked, started together, and never left behind."""

from __future__ import annotations

import os
import time

import pytest

from cluster.bench import pool_process
from cluster.bench.pool_process import LEAD_S, BenchFailed, Worker, cores, start_together, workers
from kvpool.process import start_ticks


@pytest.mark.parametrize(
    ("count", "allowed", "given"),
    [(2, {3}, [None, None]), (2, {5, 1}, [1, 5]), (3, {5, 1}, [1, 5, 1]), (2, {0, 1, 2, 3}, [0, 1])],
)
def test_a_core_for_each(count: int, allowed: set[int], given: list[int | None]) -> None:
    assert cores(count, allowed) == given


def test_a_worker_stays_on_its_core() -> None:
    core = min(os.sched_getaffinity(0))
    with Worker(core) as worker:
        worker.ask("python_pairs", capacity_blocks=16, start_ns=0, stop_ns=0)
        assert os.sched_getaffinity(worker.pid) == {core}


def test_together_means_at_the_same_time() -> None:
    """One begin and one end for all, however late a busy machine lets one of them begin."""
    with workers(2) as pair:
        start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
        spans = start_together(pair, 0.1, "python_pairs", capacity_blocks=16)
    assert len(spans) == 2
    assert all(span["pairs"] > 0 for span in spans)
    assert all(span["first_ns"] >= start_ns for span in spans)
    assert all(span["last_ns"] >= start_ns + 0.1e9 for span in spans)


def test_what_kvatlas_refuses_is_an_answer() -> None:
    with Worker(None) as worker:
        with pytest.raises(BenchFailed, match="did not give 16"):
            worker.ask("python_pairs", capacity_blocks=1, start_ns=0, stop_ns=0)
        assert worker.ask("python_pairs", capacity_blocks=16, start_ns=0, stop_ns=0)["pairs"] > 0


def test_a_worker_that_dies_says_why() -> None:
    with Worker(None) as worker, pytest.raises(BenchFailed, match=r"exit code 1.*KeyError: 'dance'"):
        worker.ask("dance")
    with Worker(None) as worker:
        worker.kill()
        with pytest.raises(BenchFailed, match="SIGKILL"):
            worker.ask("python_pairs", capacity_blocks=16, start_ns=0, stop_ns=0)


def test_a_worker_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_process, "QUIT_S", 0.05)
    with Worker(None) as worker:
        worker.send("python_pairs", capacity_blocks=16, start_ns=0, stop_ns=1 << 62)
        with pytest.raises(BenchFailed, match=r"within 0\.05 s"):
            worker.answer(0.05)
    assert start_ticks(worker.pid) == 0


def test_workers_end_with_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(2) as kindly:
        pass
    monkeypatch.setattr(pool_process, "QUIT_S", 0.05)
    with workers(1) as busy:
        busy[0].send("python_pairs", capacity_blocks=16, start_ns=0, stop_ns=1 << 62)
    with pytest.raises(RuntimeError), workers(1) as failed:
        raise RuntimeError
    assert [start_ticks(worker.pid) for worker in [*kindly, *busy, *failed]] == [0] * 4
