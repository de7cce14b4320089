"""Runs as a table, the machine, and doubts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.report import BY_REPLICA, doubt, machine, replica_rows, table

ENTRY = {"replica_id": "r0", "requests": 2, "prompt_tokens": 40, "cached_tokens": 10}


def run(policy: str, **other: Any) -> dict[str, Any]:
    counted = {
        "errors": 0,
        "prompt_tokens": 40,
        "cached_tokens": 10,
        "replica_queried_tokens": 40,
        "replica_hit_tokens": 10,
    }
    return {"policy": policy, **counted, "by_replica": [ENTRY]} | other


def test_a_column_for_each_run() -> None:
    head, rows = table([run("cost", errors=1), run("affinity")])
    assert head == ["MEASURE", "cost", "affinity"]
    assert ["errors", "1", "0"] in rows
    assert {len(row) for row in rows} == {3}
    assert not {"policy", "by_replica"} & {row[0] for row in rows}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), ({}, "-"), ([], "-"), ({"hit": 2, "cold": 1}, "hit 2, cold 1"), (["a", "b"], "a; b"), (0.5, "0.5")],
)
def test_a_cell(value: object, shown: str) -> None:
    assert ["x", shown] in table([run("cost", x=value)])[1]


def test_a_row_for_each_replica() -> None:
    rows = replica_rows([run("cost"), run("affinity", by_replica=[ENTRY | {"prompt_tokens": 0, "cached_tokens": 0}])])
    assert rows == [["cost", "r0", "2", "40", "10 (25%)"], ["affinity", "r0", "2", "0", "0 (0%)"]]
    assert {len(row) for row in rows} == {len(BY_REPLICA)}


@pytest.mark.parametrize(
    ("other", "doubted"),
    [
        ({}, False),
        ({"replica_hit_tokens": 11}, True),
        ({"replica_queried_tokens": 41}, True),
        ({"replica_hit_tokens": 11, "errors": 1}, False),
        ({"replica_hit_tokens": None, "replica_queried_tokens": None}, False),
    ],
)
def test_replicas_and_responses_must_agree(other: dict[str, Any], doubted: bool) -> None:
    assert bool(doubt(run("cost", **other))) is doubted


def test_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Fast CPU: 2 GHz\nmodel name\t: other\n")
    assert machine(file) == {"cpus": len(os.sched_getaffinity(0)), "cpu_model": "Fast CPU: 2 GHz"}
    assert machine(tmp_path / "none")["cpu_model"]
