"""`kvatlas serve`: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.policy import POLICIES
from tests.cluster.command import Command, assert_one_sentence


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The configurations that servers were started with; none is."""
    configs: list[object] = []
    monkeypatch.setattr("cluster.serving.serve_forever", lambda config, *_: configs.append(config))
    return configs


@pytest.mark.parametrize("place", [".", "file/log.jsonl", "x" * 300])
def test_a_decision_log_that_cannot_be_written_is_refused(
    kvatlas: Command, tmp_path: Path, started: list[object], place: str
) -> None:
    (tmp_path / "file").touch()
    done = kvatlas("serve", "--set", f"router.decision_log={tmp_path / place}")
    assert_one_sentence(done, 2, "router.decision_log", str(tmp_path / place))
    assert started == []
    assert not list(tmp_path.rglob("*.lock"))


def test_one_that_can_be_made_is_not_made_yet(kvatlas: Command, tmp_path: Path, started: list[object]) -> None:
    assert kvatlas("serve", "--set", f"router.decision_log={tmp_path / 'new' / 'log.jsonl'}").returncode == 0
    assert len(started) == 1
    assert not (tmp_path / "new").exists()


def test_a_place_on_other_machines_is_not_looked_for_here(
    kvatlas: Command, tmp_path: Path, started: list[object]
) -> None:
    options = ["--ray-address", "auto", "--set", f"router.decision_log={tmp_path}"]
    assert kvatlas("serve", *options).returncode == 0
    assert len(started) == 1


def test_help_names_every_policy(kvatlas: Command) -> None:
    said = kvatlas("serve", "--help").stdout
    assert [name for name in POLICIES if name not in said] == []
