"""The log is written by a thread of its own, holds nobody up, and is read back in order."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from router import decision_log
from router.decision_log import DecisionLog, DecisionLogRefused, Entry, Reading, check, place
from router.decision_record import Decided, Measured, Record, decided, to_line
from tests.router.decisions import a_decision, a_ticket


def measured(number: int, request_id: str = "") -> Measured:
    return Measured(float(number), request_id or f"r{number}", "a", number, None)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def test_everything_is_on_the_disk_after_closing(path: Path) -> None:
    log = DecisionLog(path)
    decision = decided(0.5, a_ticket(), a_decision())
    records: list[Record] = [decision, *(measured(number) for number in range(1, 1000))]
    for record in records:
        log.put(record)
    log.close()
    found = list(Reading(path))
    assert isinstance(found[0], Decided)
    assert found[1:] == records[1:]
    told = log.report()
    assert told == {"path": str(path), "written": 1000, "dropped": 0, "failed": 0, "problem": ""}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    log.close()


def test_a_log_that_ended_is_gone_on_with(path: Path) -> None:
    for number in (1, 2):
        log = DecisionLog(path)
        log.put(measured(number))
        log.close()
    assert list(Reading(path)) == [measured(1), measured(2)]


def test_files_stay_small_and_are_read_from_the_oldest_on(path: Path) -> None:
    log = DecisionLog(path, max_bytes=4096, keep=3)
    for number in range(2000):
        log.put(measured(number))
        if number % 20 == 19:  # so that batches are small next to a file
            wait_for(lambda: log.counts["written"] == number + 1)  # noqa: B023
    log.close()
    files = [file for chain in Reading(path).files for file in chain]
    assert [file.name for file in files] == [f"{path.name}.2", f"{path.name}.1", path.name]
    assert all(file.stat().st_size <= 4096 for file in files)
    numbers = [record.time_s for record in Reading(path)]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 1999.0


class Stuck(DecisionLog):
    """Its disk hangs until it is let go."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.writing, self.go_on = threading.Event(), threading.Event()
        super().__init__(path, capacity=capacity)

    def _write(self, entries: list[Entry]) -> None:
        self.writing.set()
        assert self.go_on.wait(30)
        super()._write(entries)


def test_a_disk_that_hangs_holds_nobody_up_and_what_is_lost_is_counted(path: Path) -> None:
    log = Stuck(path, capacity=8)
    log.put(measured(0))
    assert log.writing.wait(30)
    for number in range(1, 101):  # eight of them fit
        log.put(measured(number))
    assert log.report()["dropped"] == 92
    log.go_on.set()
    log.close()
    assert list(Reading(path)) == [measured(number) for number in range(9)]
    assert (log.counts["written"], log.counts["dropped"]) == (9, 92)


def test_a_place_that_cannot_be_written_to_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "_RETRY_S", 0.0)
    (tmp_path / "file").touch()
    log = DecisionLog(tmp_path / "file" / "decisions.jsonl")
    for number in range(5):
        log.put(measured(number))
        wait_for(lambda: log.counts["failed"] == number + 1)  # noqa: B023
    assert log.report()["problem"]
    log.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "router.decision_log" in caplog.text


def test_a_place_that_is_there_again_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "_RETRY_S", 0.0)
    place = tmp_path / "place"
    place.touch()
    log = DecisionLog(place / "decisions.jsonl")
    log.put(measured(1))
    wait_for(lambda: log.counts["failed"] == 1)
    place.unlink()
    log.put(measured(2))
    log.close()
    assert list(Reading(place / "decisions.jsonl")) == [measured(2)]
    assert log.report()["problem"] == ""


def test_logs_of_several_processes_are_one(path: Path) -> None:
    logs = [DecisionLog(path), DecisionLog(path)]
    for log, numbers in zip(logs, ((1, 4, 5), (2, 3, 6)), strict=True):
        for number in numbers:
            log.put(measured(number))
        wait_for(lambda: log.counts["written"] == len(numbers))  # noqa: B023
    for log in logs:
        log.close()
    assert len({log.report()["path"] for log in logs}) == 2
    assert [record.time_s for record in Reading(path)] == [1, 2, 3, 4, 5, 6]


def test_lines_that_are_torn_are_passed_over_and_counted(path: Path) -> None:
    path.write_bytes(to_line(measured(1)) + b"nothing of ours\n" + to_line(measured(2)) + to_line(measured(3))[:-9])
    reading = Reading(path)
    assert list(reading) == [measured(1), measured(2)]
    assert reading.malformed == 2


def test_no_log_is_empty(path: Path) -> None:
    reading = Reading(path)
    assert (reading.files, list(reading)) == ([], [])


def test_a_record_may_be_made_by_the_log_s_thread(path: Path) -> None:
    made_in: list[str] = []

    def make() -> Record:
        made_in.append(threading.current_thread().name)
        return measured(1)

    log = DecisionLog(path)
    log.put(make)
    log.close()
    assert list(Reading(path)) == [measured(1)]
    assert made_in == ["kvatlas-decision-log"]


def test_a_place_that_is_none_is_known_before_anything_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(tmp_path)
    wait_for(lambda: bool(log.report()["problem"]))
    log.close()
    assert (log.report()["failed"], log.report()["written"]) == (0, 0)
    assert "router.decision_log" in caplog.text
    assert list(tmp_path.parent.glob(f"{tmp_path.name}*.lock")) == []


def test_a_log_that_is_taken_away_goes_on(path: Path) -> None:
    log = DecisionLog(path)
    log.put(measured(1))
    wait_for(lambda: log.counts["written"] == 1)
    path.unlink()
    log.put(measured(2))
    log.close()
    assert list(Reading(path)) == [measured(2)]
    assert log.report()["problem"] == ""


def test_a_line_that_was_torn_costs_no_other_record(path: Path) -> None:
    path.write_bytes(to_line(measured(1)) + to_line(measured(2))[:-9])
    for number in (3, 4):
        log = DecisionLog(path)
        log.put(measured(number))
        log.close()
    reading = Reading(path)
    assert list(reading) == [measured(1), measured(3), measured(4)]
    assert reading.malformed == 1


def test_the_option_is_checked_in_a_sentence(tmp_path: Path) -> None:
    check("")
    check(str(tmp_path / "new" / "log.jsonl"))
    with pytest.raises(DecisionLogRefused, match=r"is a directory; set router\.decision_log"):
        check(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_none_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/a/home")
    assert place("~/log") == Path("/a/home/log")
    assert place("~nobody-of-this-name/log") == Path("~nobody-of-this-name/log")
