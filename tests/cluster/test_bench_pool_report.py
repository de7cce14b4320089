"""The pool benchmark as it is printed."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.bench import pool_report
from cluster.bench.pool_run import figures

ROUND = {
    "pairs_per_s_1": 400_000.0,
    "pairs_per_s_2": 800_000.0,
    "flock_pairs_per_s_2": 20_000.0,
    "python_pool_pairs_per_s": 160_000.0,
    "match_us": 30.0,
    "reclaim_ms": 2.0,
    "cas_tries": 1000,
    "cas_retries": 1,
}


def told() -> dict[str, Any]:
    part = {"damaged_blocks": 1000, "unusable_before": 999, "unusable_after": 0, "pass_ms": 1.25}
    return {
        **figures([ROUND]),
        "tidy": {"reclaim": part},
        "startup": {"create_s": 0.5, "attach_s": 0.1, "control_share": 0.0009, "bytes": 1_510_000_000},
        "capacity_blocks": 16384,
        "seconds": 2.0,
        "rounds": 3,
        "load_before": 0.0,
        "cores": [0, 1],
        "machine": {"cpus": 2, "cpu_model": "Fast CPU"},
    }


def test_every_figure_has_a_row() -> None:
    rows = pool_report.figure_rows(told())
    shown = {row[0]: row[1] for row in rows}
    assert list(shown) == list(figures([ROUND]))
    assert {len(row) for row in rows} == {len(pool_report.FIGURES)}
    assert [shown[name] for name in ("pairs_per_s_1", "match_1000_us", "cas_retry_share", "over_python")] == [
        "400,000",
        "30",
        "0.001",
        "2.5",
    ]


@pytest.mark.parametrize(("value", "cell"), [(0.0, "0"), (0.00012345, "0.000123"), (12.345, "12.3"), (999.6, "1,000")])
def test_a_number_keeps_what_counts(value: float, cell: str) -> None:
    assert pool_report.figure_rows(told() | {"pairs_per_s_1": value})[0][1] == cell


def test_every_part_has_a_row() -> None:
    rows = pool_report.tidy_rows(told())
    assert rows == [["reclaim", "1000", "999", "0", "1.25 ms"]]
    assert {len(row) for row in rows} == {len(pool_report.TIDY)}


def test_the_start() -> None:
    assert "1.51 GB: made in 0.50 s, joined in 0.10 s" in pool_report.startup(told())
    assert "0.09%" in pool_report.startup(told())
    assert "left out, no room" in pool_report.startup({"startup": {"skipped": "no room"}})


def test_a_busy_machine_is_doubted() -> None:
    assert pool_report.doubt(told()) == ""
    assert "load average 3.2" in pool_report.doubt(told() | {"load_before": 3.21})


def test_the_setting() -> None:
    said = pool_report.setting(told())
    for word in ("16384 blocks", "3 x 2 s", "cores 0, 1", "2 CPUs, Fast CPU"):
        assert word in said
    assert "not pinned" in pool_report.setting(told() | {"cores": [None, None]})
