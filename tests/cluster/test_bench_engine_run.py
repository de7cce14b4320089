"""What the engine benchmark makes of what it measured; its command; and a whole run as small as it can be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.bench import engine_report, engine_run
from cluster.bench.engine_fit import Fit
from cluster.bench.engine_http import First, http_figures, prompt
from cluster.bench.engine_plan import Plan, Point
from cluster.bench.engine_rates import Shape
from cluster.bench.engine_run import Prompted, Taken, bandwidth_gb_s, calibration_steps, figures, measure, take
from router.replay.service_times import H100_8B, read
from tests.cluster.command import Command, assert_one_sentence
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint

KEYS = {
    "bandwidth_gb_s",
    "gemm_gflops",
    "grid",
    "prefill_tok_s",
    "prefill_fraction",
    "cached_ttft_ms",
    "cold_ttft_ms",
    "peak_rss_mb",
    "disturbed_share",
    "startup",
}
GRID_KEYS = {"ctx", "batch", "engines", "tok_s", "ceiling_tok_s", "fraction"}
ONE, TWO = Point(64, 16), Point(64, 16, 2)
STARTUP = {"imports_s": 2.5, "weights_s": 0.3, "total_s": 2.8}


def taken() -> list[Taken]:
    """Three rounds on a machine that got faster: fractions .5, .4 and .3, then .2, .25 and .1."""
    first = [
        Taken(ONE, 100.0, 200.0, 20.0, 64.0),
        Taken(ONE, 200.0, 500.0, 50.0, 64.0),
        Taken(ONE, 90.0, 300.0, 30.0, 64.0),
    ]
    second = [
        Taken(TWO, 40.0, 200.0, 20.0, 64.0),
        Taken(TWO, 125.0, 500.0, 50.0, 64.0),
        Taken(TWO, 30.0, 300.0, 30.0, 64.0),
    ]
    return [one for pair in zip(first, second, strict=True) for one in pair]


def prompted() -> list[Prompted]:
    return [
        Prompted(1000, cold, (0.05, 0.06, 0.09), 400.0, share) for cold, share in ((1.0, 0.5), (0.8, 0.7), (2.0, 0.2))
    ]


def told(**more: Any) -> dict[str, Any]:
    found = figures(taken(), prompted())
    rest = {"bandwidth_gb_s": 33.0, "peak_rss_mb": 1500.0, "startup": STARTUP}
    said = {
        "model": "demo",
        "mode": "fast",
        "deterministic": False,
        "rounds": 3,
        "steps": 24,
        "prompt_tokens": 1000,
        "threads": 2,
    }
    return found | rest | said | {"load_before": 0.1, "machine": {"cpus": 2, "cpu_model": "X"}} | more


def through_http() -> dict[str, Any]:
    slower = [Taken(one.point, one.tok_s * 0.9, one.ceiling_tok_s, one.bandwidth_gb_s, 64.0) for one in taken()]
    first = [First(0.9, (0.07, 0.2)), First(0.7, (0.06,)), First(2.0, ()), First(9.0, (9.0,) * 5, others=0.3)]
    found = http_figures(slower, {ONE: [16], TWO: [8, 8]}, first, told())
    return found | {"startup": [{"replicas": 1, "ready_s": 12.0, "load_s": {"load": 1.5}}]}


def test_figures_are_medians_and_fractions_are_of_their_own_round() -> None:
    found = figures(taken(), prompted())
    assert [Point(one["ctx"], one["batch"], one["engines"]) for one in found["grid"]] == [ONE, TWO]
    first, second = found["grid"]
    assert set(first) == GRID_KEYS
    assert (first["tok_s"], first["ceiling_tok_s"], first["fraction"]) == (100.0, 300.0, 0.4)
    assert (second["tok_s"], second["fraction"]) == (40.0, 0.2)
    assert (found["prefill_tok_s"], found["prefill_fraction"]) == (1000.0, 0.5)
    assert (found["cold_ttft_ms"], found["cached_ttft_ms"]) == (1000.0, pytest.approx(60.0))


def test_what_others_disturbed_counts_only_where_there_is_nothing_else() -> None:
    disturbed = [replace(one, tok_s=1.0, others=0.3) for one in taken()]
    assert figures([*disturbed, *taken()], prompted())["grid"] == figures(taken(), prompted())["grid"]
    assert figures(disturbed, prompted())["grid"][0]["tok_s"] == 1.0
    late = [replace(one, cold_s=9.0, gemm_gflops=1.0, others=0.3) for one in prompted()]
    found = figures([*disturbed, *taken()], [*late, *prompted()])
    assert found["disturbed_share"] == 0.5
    assert (found["cold_ttft_ms"], found["gemm_gflops"]) == (1000.0, 400.0)
    assert bandwidth_gb_s([replace(taken()[0], bandwidth_gb_s=1.0, others=0.3), *taken()]) == 30.0


def test_a_measurement_has_the_ceiling_of_its_moment() -> None:
    shape = Shape(weight_bytes=1_000_000, linear_parameters=1, token_bytes=1000)
    streams = [[(step * 10_000_000, step + 1) for step in range(10)]] * 2
    found = take(Point(64, 2), streams, 58, shape, (1.0, 3.0), 0.25)
    assert found.others == 0.25
    assert found.tok_s == pytest.approx(200.0)
    assert (found.bandwidth_gb_s, found.context_tokens) == (2.0, 64.0)
    assert found.ceiling_tok_s == pytest.approx(2 * 2e9 / (1_000_000 + 2 * 64 * 1000))


def test_decode_steps_are_calibrated_by_one_engine() -> None:
    disturbed = [replace(one, tok_s=1.0, others=0.3) for one in taken()]
    wide = [Taken(Point(512, 8), 80.0, 200.0, 20.0, 511.0, 0.3)]  # disturbed, and all there is of this point
    steps = calibration_steps([*disturbed, *taken(), *wide])
    assert [(step.decodes, step.context_tokens, step.prompt_tokens) for step in steps] == [
        (16, 1024.0, 0),
        (8, 4088.0, 0),
    ]
    assert [step.seconds for step in steps] == pytest.approx([16 / 100, 8 / 80])


def test_http_is_compared_with_the_same_point_in_process() -> None:
    found = through_http()
    assert [one["over_engine"] for one in found["grid"]] == pytest.approx([0.9, 0.9])
    assert [one["split"] for one in found["grid"]] == [[16], [8, 8]]
    assert (found["cold_ttft_ms"], found["cached_ttft_ms"]) == (900.0, 70.0)
    assert http_figures([], {}, [First(1.0, (1.0,))], {"grid": []})["grid"] == []


def test_prompts_through_http_begin_alike_for_one_number_only() -> None:
    assert prompt(1, 50) == prompt(1, 90)[:50]
    assert prompt(1, 16) != prompt(2, 16)


def test_tables_say_what_was_measured() -> None:
    head, rows = engine_report.grid(told())
    assert (head, rows[1]) == (engine_report.GRID, ["64", "16", "2", "40", "300", "0.20"])
    head, rows = engine_report.grid(told(http=through_http()))
    assert head == [*engine_report.GRID, *engine_report.OVER_HTTP]
    assert rows[0][6:] == ["90", "0.36", "0.90"]
    names = {row[0] for row in engine_report.figure_rows(told(http=through_http()))}
    assert KEYS - {"grid", "startup", "disturbed_share"} | {"http cold_ttft_ms", "http cached_ttft_ms"} == names
    lines = engine_report.startup(told(http=through_http())).splitlines()
    assert lines[0] == "Process to first token 2.8 s: imports 2.50 s, weights 0.30 s."
    assert lines[1] == "Server with 1 replica ready after 12.0 s; in a replica load 1.50 s."


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, ""),
        ({"disturbed_share": 0.7}, "70% of the measurements"),
        ({"threads": 4}, "--threads"),
    ],
)
def test_what_makes_figures_doubtful_is_told(more: dict[str, Any], words: str) -> None:
    doubt = engine_report.doubt(told(**more))
    assert words in doubt
    assert bool(doubt) == bool(words)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    plans: list[Plan] = []

    def pretend(plan: Plan, directory: Path, say: Callable[[str], None]) -> tuple[dict[str, Any], Fit | None]:
        plans.append(plan)
        say("on its way")
        found = told()
        if not plan.contexts:
            found["grid"] = []
        return found, Fit(H100_8B, 0.02, 30) if plan.calibrate else None

    monkeypatch.setattr(engine_run, "measure", pretend)
    return plans


def test_the_command(kvatlas: Command, asked: list[Plan], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    given = ["--ctx", "512,64", "--batch", "8", "--rounds", "2", "--steps", "8", "--prompt-tokens", "100", "--http"]
    done = kvatlas("bench", "engine", "--grid", "--calibrate", str(file), "--mode", "exact", *given, "--json")
    assert (done.returncode, done.stderr) == (0, "on its way\n")
    wanted = Plan("demo", "exact", (64, 512), (8,), 2, 8, 100, http=True, calibrate=True)
    assert asked == [wanted]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record.keys() >= KEYS | {"machine", "calibration"}
    assert record["calibration"]["token_s"] == H100_8B.token_s
    assert read(file) == H100_8B

    table = kvatlas("bench", "engine", "--grid").stdout
    assert asked[1] == Plan()
    assert table.splitlines()[0].split() == engine_report.GRID
    assert "imports 2.50 s" in table
    without = kvatlas("bench", "engine", "--quick", "--deterministic").stdout
    assert asked[2] == Plan(contexts=(), batches=(), rounds=1, deterministic=True)
    assert "demo, fast mode, deterministic, 2 threads" in without
    assert without.splitlines()[0].split() == engine_report.FIGURES


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--grid", "--ctx", "64,x"], ["--ctx 64,x", "whole numbers"]),
        (["--grid", "--batch", "0"], ["--batch 0", "whole numbers"]),
        (["--grid", "--batch", ","], ["--batch", "whole numbers"]),
        (["--mode", "slow"], ["--mode slow", "exact, fast"]),
        (["--deterministic", "--mode", "exact"], ["--deterministic", "--mode fast"]),
        (["--calibrate", "x.json"], ["--grid"]),
        (["--grid", "--calibrate", "/nowhere/at/all.json"], ["/nowhere/at/all.json", "another path"]),
        (["--grid", "--calibrate", "/"], ["another path"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    kvatlas: Command, asked: list[Plan], given: list[str], words: list[str]
) -> None:
    assert_one_sentence(kvatlas("bench", "engine", *given), 2, *words)
    assert asked == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    """Four processes and a tiny model; figures that are what they are on this machine, but figures."""
    model, regions = tmp_path / "model", tmp_path / "regions"
    save_tiny_checkpoint(model)
    regions.mkdir()
    plan = Plan(
        str(model), contexts=(40, 120), batches=(1, 4), rounds=1, steps=8, prompt_tokens=100, threads=2, calibrate=True
    )
    said: list[str] = []
    found, fitted = measure(plan, regions, said.append)
    assert list(regions.iterdir()) == []
    assert found.keys() >= KEYS
    assert [(one["ctx"], one["batch"], one["engines"]) for one in found["grid"]] == [
        (40, 1, 1),
        (40, 4, 1),
        (120, 1, 1),
        (120, 4, 1),
        (40, 4, 2),
        (120, 4, 2),
    ]
    figures_ = [value for one in found["grid"] for value in one.values()]
    figures_ += [found[name] for name in KEYS - {"grid", "startup"}] + list(found["startup"].values())
    assert all(math.isfinite(value) and value >= 0 for value in figures_)
    assert found["peak_rss_mb"] > 100
    startup = found["startup"]
    assert startup["total_s"] == pytest.approx(sum(startup.values()) - startup["total_s"])
    assert fitted is not None
    assert fitted.steps == 4 + 9
    assert fitted.times.step_tokens > fitted.times.max_running
    json.dumps(found, allow_nan=False)
