"""The router benchmark as it is printed."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.bench import router_report
from cluster.bench.router_run import figures

ROUND: dict[str, Any] = {
    "lookups_us": [4.0, 5.0, 6.0],
    "apply_blocks_per_s": 8_000_000.0,
    "decide64_us": 40.0,
    "decide1024_us": 200.0,
    "ids_us": 500.0,
}


def told() -> dict[str, Any]:
    return {
        **figures([ROUND]),
        **{"bytes_per_entry": 52.5, "pairs": 16_000_000, "table_keys": 9_000_000},
        **{"table_bytes": 400_000_000, "cache_bytes": 300_000_000},
        **{"entries": 1_000_000, "rounds": 10, "load_before": 0.0, "machine": {"cpus": 2, "cpu_model": "Fast CPU"}},
    }


def test_every_figure_has_a_row() -> None:
    over_redis = {"visible_p50_ms": 5.0, "visible_p99_ms": 9.0, "redis_ops_per_request": 8.0}
    over_redis |= {"redis_bytes_per_request": 2000.0, "blind_ms": 20.0}
    rows = router_report.figure_rows(told() | over_redis)
    assert {row[0] for row in rows} == {*figures([ROUND]), "bytes_per_entry", *over_redis}
    assert {len(row) for row in rows} == {len(router_report.FIGURES)}
    shown = {row[0]: row[1] for row in rows}
    assert (shown["apply_blocks_per_s"], shown["bytes_per_entry"], shown["lookup_p50_us"]) == ("8,000,000", "52.5", "5")


def test_what_was_left_out_has_no_row() -> None:
    assert "blind_ms" not in {row[0] for row in router_report.figure_rows(told())}


@pytest.mark.parametrize(
    ("changed", "words"),
    [({}, ""), ({"load_before": 3.21}, "load average 3.2"), ({"table_bytes": 1}, "last-level cache")],
)
def test_doubts(changed: dict[str, Any], words: str) -> None:
    doubt = router_report.doubt(told() | changed)
    assert words in doubt
    assert bool(doubt) == bool(words)


def test_the_setting() -> None:
    said = router_report.setting(told())
    for word in ("1,000,000 keys", "400 MB", "300 MB", "10 rounds", "2 CPUs, Fast CPU"):
        assert word in said
