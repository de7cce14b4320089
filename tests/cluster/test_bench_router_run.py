"""A run of the router benchmark, as small as it can be."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.bench import router_run
from cluster.bench.pool_process import BenchFailed
from cluster.bench.router_plan import LEAST_ENTRIES, Plan
from cluster.bench.router_run import cache_bytes, figures, measure, percentile
from tests.cluster.command import Command

TINY = Plan(
    entries=20_000, rounds=2, pools=40, many_pools=48, batches=90, decisions=10, prompts=1, flights=2, beyond_cache=False,
    redis=False,
)  # fmt: skip
ASKED = (
    "lookup_p50_us",
    "lookup_p99_us",
    "apply_blocks_per_s",
    "decide64_p50_us",
    "decide1024_p50_us",
    "ids_to_decision_16k_p50_us",
    "bytes_per_entry",
)


def test_figures_are_medians_over_rounds_and_look_ups_are_taken_together() -> None:
    one = {
        "lookups_us": [1.0, 2.0],
        "apply_blocks_per_s": 10.0,
        "decide64_us": 5.0,
        "decide1024_us": 50.0,
        "ids_us": 1.0,
    }
    rounds = [one, one | {"lookups_us": [3.0, 90.0], "apply_blocks_per_s": 30.0}, one | {"apply_blocks_per_s": 20.0}]
    found = figures(rounds)
    assert (found["lookup_p50_us"], found["lookup_p99_us"], found["apply_blocks_per_s"]) == (2.0, 90.0, 20.0)
    assert list(found) == list(ASKED[:-1])


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_a_percentile(share: float, value: int) -> None:
    assert percentile(range(1, 101), share) == value


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    assert cache_bytes(tmp_path) == 0
    for number, text in enumerate(("48K\n", "2048K\n", "300M\n", "512\n")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(text)
    assert cache_bytes(tmp_path) == 300 << 20


def test_a_run_has_every_figure_and_its_sizes() -> None:
    said: list[str] = []
    told = measure(TINY, said.append)
    for name in ASKED:
        assert math.isfinite(told[name]), name
        assert told[name] > 0, name
    assert told["lookup_p50_us"] <= told["lookup_p99_us"]
    assert (told["entries"], told["rounds"], told["table_keys"]) == (20_000, 2, 22_000)
    assert told["pairs"] > told["table_keys"]
    assert "visible_p99_ms" not in told
    assert "round 2 of 2" in said


def test_the_table_is_filled_until_it_is_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_run, "cache_bytes", lambda: 1_500_000)
    told = measure(dataclasses.replace(TINY, beyond_cache=True), lambda text: None)
    assert told["table_keys"] > 40_000
    assert told["table_bytes"] > told["cache_bytes"] == 1_500_000


def test_a_mirror_that_does_not_find_what_pools_hold_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_run, "distinct_depths", lambda depths: 15)
    with pytest.raises(BenchFailed, match="15 different depths"):
        measure(TINY, lambda text: None)


def test_one_json_object(monkeypatch: pytest.MonkeyPatch, kvatlas: Command) -> None:
    given: list[Plan] = []

    def small(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
        given.append(plan)
        say("round 1")
        return measure(TINY, say) | {"load_before": 3.0}

    monkeypatch.setattr(router_run, "measure", small)
    done = kvatlas("bench", "router", "--no-redis", "--rounds", "3", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert set(told) >= {*ASKED, "machine"}
    assert given == [Plan(rounds=3, redis=False)]
    assert "round 1" in done.stderr
    assert "busy" in done.stderr
    table = kvatlas("bench", "router", "--entries", str(LEAST_ENTRIES), "--no-beyond-cache").stdout
    assert {line.split()[0] for line in table.splitlines() if line} >= {"MEASURE", *ASKED}
    assert given[1] == Plan(entries=LEAST_ENTRIES, beyond_cache=False)


def test_the_command_refuses_a_size_that_measures_nothing(kvatlas: Command) -> None:
    done = kvatlas("bench", "router", "--entries", "10")
    assert (done.returncode, "--entries" in done.stderr) == (2, True)
