"""`kvatlas directory check` against the HTTP app: exit codes, what is repeated, and what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import ports, server_state
from cluster.cli.directory import DIFFERENCES, PAUSE_S, Comparison, settle
from cluster.cli.target import KEY_VARIABLE, Target
from kvpool.directory import DirectoryUnavailable
from tests.cluster.command import Command, Done, assert_one_sentence
from tests.cluster.conftest import ADMIN_KEY
from tests.fakes.engine import CLEAN_CHECK, ROUTING, FakeEngine

PHANTOM = CLEAN_CHECK | {
    "pool": "p1",
    "replica_ids": ["r0", "r1"],
    "places": [
        {"place": "directory", "missing": 0, "phantom": 0, "examples": []},
        {"place": "i0", "missing": 0, "phantom": 0, "examples": []},
        {"place": "i1", "missing": 2, "phantom": 1200, "examples": ["0f" * 16]},
    ],
}


@pytest.fixture
def check(kvatlas: Command, served_url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command with the admin key, about the served app, which has a directory."""
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)
    engine.report = ROUTING

    def run(*arguments: str) -> Done:
        return kvatlas("directory", "check", "--url", served_url, *arguments)

    return run


class Settling(FakeEngine):
    """Answers one after the other; the last one for ever."""

    def __init__(self, *answers: list[dict[str, Any]] | Exception) -> None:
        super().__init__()
        self.answers = list(answers)

    async def check_directory(self) -> list[dict[str, Any]]:
        self.checks = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await super().check_directory()


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 50.0
        self.asked = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def settle(self, within_s: float, *answers: Comparison) -> Comparison:
        def ask() -> Comparison:
            self.asked += 1
            return answers[min(self.asked, len(answers)) - 1]

        return settle(ask, within_s, lambda: self.now, self.sleep)


CLEAN, DIFFERING, AWAY = Comparison([CLEAN_CHECK]), Comparison([PHANTOM]), Comparison([], "the directory is away")


@pytest.mark.parametrize(
    ("within_s", "answers", "expected", "asked"),
    [
        (5.0, [CLEAN, DIFFERING], CLEAN, 1),
        (5.0, [DIFFERING, AWAY, CLEAN, DIFFERING], CLEAN, 3),
        (0.0, [DIFFERING, CLEAN], DIFFERING, 1),
        (3.5 * PAUSE_S, [DIFFERING], DIFFERING, 4),
        (3.5 * PAUSE_S, [AWAY, DIFFERING, AWAY], AWAY, 4),
    ],
)
def test_asks_until_clean_or_time_is_up(
    within_s: float, answers: list[Comparison], expected: Comparison, asked: int
) -> None:
    time = Time()
    assert time.settle(within_s, *answers) is expected
    assert time.asked == asked
    assert time.now <= 50.0 + within_s


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("place", [0, 1])
def test_every_kind_of_difference_counts_at_every_place(name: str, place: int) -> None:
    places = [dict(one) for one in CLEAN_CHECK["places"]]
    places[place][name] = 3
    found = Comparison([CLEAN_CHECK, CLEAN_CHECK | {"places": places}])
    assert (found.differing, found.is_clean) == (3, False)


def test_a_pool_that_replicas_share_counts_once() -> None:
    assert Comparison([PHANTOM]).differing == 1202


def test_no_difference(check: Command, engine: FakeEngine) -> None:
    engine.checks = [CLEAN_CHECK]
    done = check()
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "No difference."
    rows = [row.split() for row in done.stdout.splitlines()[1:3]]
    assert rows == [["p0", "r0", "5", "directory", "0", "0"], ["p0", "r0", "5", "mirror", "of", "i0", "0", "0"]]
    assert json.loads(check("--json").stdout) == {"pools": [CLEAN_CHECK], "clean": True, "problem": ""}


def test_differences_that_remain(check: Command, engine: FakeEngine) -> None:
    engine.checks = [CLEAN_CHECK, PHANTOM]
    done = check("--within", "0")
    assert done.returncode == 1
    assert done.stderr == ""
    rows = done.stdout.splitlines()
    assert rows[5].split() == ["p1", "r0,r1", "5", "mirror", "of", "i1", "2", "1,200"]
    assert [row for row in rows if "example" in row] == [f"pool p1, mirror of i1: for example {'0f' * 16}"]
    assert max(map(len, rows)) <= 120
    told = check("--within", "0", "--json")
    assert told.returncode == 1
    assert json.loads(told.stdout) == {"pools": [CLEAN_CHECK, PHANTOM], "clean": False, "problem": ""}


def test_a_pool_that_is_not_in_the_directory_has_its_replica_s_name(check: Command, engine: FakeEngine) -> None:
    engine.checks = [PHANTOM | {"pool": "", "replica_ids": ["r7"]}]
    rows = check("--within", "0").stdout.splitlines()
    assert rows[1].split()[:2] == ["-", "r7"]
    assert any("of r7" in row and "0f" * 16 in row for row in rows[4:])


@pytest.mark.parametrize("engine", [Settling([PHANTOM], DirectoryUnavailable("away"), [CLEAN_CHECK])])
def test_a_difference_on_its_way_is_none(check: Command, engine: Settling) -> None:
    assert check("--within", "60").returncode == 0
    assert len(engine.answers) == 1


def test_a_directory_that_does_not_answer(check: Command, engine: FakeEngine) -> None:
    engine.checks = DirectoryUnavailable("Redis is away: start it")
    assert_one_sentence(check("--within", "0"), 1, "Redis is away: start it")
    told = check("--within", "0", "--json")
    assert told.returncode == 1
    assert json.loads(told.stdout) == {"pools": [], "clean": False, "problem": "Redis is away: start it"}


def test_nothing_compared_is_not_clean(check: Command) -> None:
    assert_one_sentence(check("--within", "0"), 1, "No pool was compared", "kvatlas status")
    assert json.loads(check("--within", "0", "--json").stdout)["clean"] is False


def test_no_directory_is_said_at_once(check: Command, engine: FakeEngine) -> None:
    engine.report = {}
    assert_one_sentence(check("--within", "3600"), 1, "directory.redis_url")
    assert json.loads(check("--json").stdout)["clean"] is False


def test_keys(check: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    assert_one_sentence(check("--within", "3600"), 2, KEY_VARIABLE)
    monkeypatch.delenv(KEY_VARIABLE)
    assert_one_sentence(check("--json"), 2, KEY_VARIABLE)


def test_nothing_answers(kvatlas: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)
    url = f"http://127.0.0.1:{ports.choose('127.0.0.1', 0)}"
    assert_one_sentence(kvatlas("directory", "check", "--url", url, "--within", "3600"), 1, url)
    assert url in json.loads(kvatlas("directory", "check", "--url", url, "--json").stdout)["problem"]


def test_the_server_running_here_is_found_with_its_key(
    kvatlas: Command, served_url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.report, engine.checks = ROUTING, [CLEAN_CHECK]
    state = server_state.here("127.0.0.1", 1234, served_url, "tiny", ADMIN_KEY)
    server_state.write(tmp_path / "run", state)
    assert_one_sentence(kvatlas("directory", "check"), 1, "still starting")
    assert json.loads(kvatlas("directory", "check", "--json").stdout)["clean"] is False
    server_state.write(tmp_path / "run", replace(state, metrics_url="http://metrics"))
    assert kvatlas("directory", "check", "--port", "1234").returncode == 0
    assert_one_sentence(kvatlas("directory", "check", "--url", served_url, "--port", "1234"), 2, "--url", "--port")


def test_the_key_is_in_no_text() -> None:
    assert "sesame" not in repr(Target("http://h", ADMIN_KEY, None))
