"""Calibration files, and what follows from them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.replay.errors import ReplayError
from router.replay.service_times import H100_8B, ServiceTimes, read
from tests.router.replay.traces import BLOCK, QUICK, trace_of

SHIPPED = Path(__file__).parents[3] / "deploy" / "calibration-h100-8b.json"


def test_the_file_that_is_shipped_is_the_default_and_says_how_it_came_about() -> None:
    assert read(SHIPPED) == H100_8B
    assert "not measured" in " ".join(json.loads(SHIPPED.read_text())["comment"])


WILD: list[Any] = [1e300, 10**400, 10**30, -1, None, "1", [], float("nan"), True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_s", 0.0),
        ("token_s", -1.0),
        ("pair_s", float("inf")),
        ("weights_s", "1"),
        ("max_running", 2.5),
        ("max_running", True),
        ("step_tokens", 0),
        ("step_tokens", QUICK.max_running),
        *((name, value) for name in asdict(QUICK) for value in WILD),
        ("token_s", 1e-300),
    ],
)
def test_what_no_replica_takes_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(asdict(QUICK) | {name: value}))
    with pytest.raises(ReplayError, match=name):
        read(file)


def test_one_replica_needs_at_most_what_all_work_and_the_longest_request_take() -> None:
    trace = trace_of([[1, 2, 3]] * 4, output_tokens=9)
    bound_s = QUICK.longest_s(trace)
    assert bound_s >= QUICK.work_s(trace, np.zeros(4, np.int64)).sum() + 9 * QUICK.weights_s
    assert replace(QUICK, weights_s=1.0).longest_s(trace) > bound_s + 9 * 0.9


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ReplayError, match="cannot be read"):
            read(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"token_s": 1}', "[" * 100_000, "null", "\ufeff7"])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(ReplayError, match="is no calibration"):
        read(file)


def test_work_counts_pairs_as_chunks_do() -> None:
    trace = trace_of([[1, 2, 3]], tail=0, output_tokens=1)
    only_pairs = ServiceTimes(1e-12, 1.0, 0.0, 0.0, 0.0, 32, 4)
    tokens = 3 * BLOCK
    (whole,) = only_pairs.work_s(trace, np.array([0]))
    assert whole == pytest.approx(tokens * (tokens + 1) / 2)
    (rest,) = only_pairs.work_s(trace, np.array([BLOCK]))
    assert rest == pytest.approx(whole - BLOCK * (BLOCK + 1) / 2)


def test_saturation_is_the_work_that_sharing_leaves_divided_by_the_replicas() -> None:
    trace = trace_of([[1, 2, 3]] * 10)
    alone = QUICK.saturated_s(trace, 1)
    assert QUICK.saturated_s(trace, 4) == pytest.approx(alone / 4)
    assert QUICK.saturated_s(trace.unshared(), 1) > 2 * alone
    assert replace(QUICK, token_s=1.0).saturated_s(trace, 1) > alone
