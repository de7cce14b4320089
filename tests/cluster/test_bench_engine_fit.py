"""Service times are found again from steps made of them, and written so that a replay reads them."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cluster.bench.engine_fit import Fit, Step, comment, fit, write
from cluster.bench.engine_plan import Plan
from cluster.errors import UsageError
from router.replay.errors import ReplayError
from router.replay.service_times import H100_8B, ServiceTimes, read

CPU = ServiceTimes(
    token_s=0.6e-3,
    pair_s=2e-7,
    weights_s=0.014,
    context_token_s=2.5e-6,
    overhead_s=0.006,
    step_tokens=256,
    max_running=32,
)
"""About what two cores do with the demo model."""


def seconds(times: ServiceTimes, step: Step) -> float:
    """As the replay reckons."""
    return (
        times.overhead_s
        + max(times.weights_s, step.tokens * times.token_s)
        + step.pairs * times.pair_s
        + step.context_tokens * times.context_token_s
    )


def measured(times: ServiceTimes) -> list[Step]:
    """The steps that the benchmark takes, as a machine with these times would do them."""
    asked = [Step(0, 0, 0, batch, batch * ctx) for ctx in (64, 512, 1500) for batch in (1, 8, 16)]
    size = times.step_tokens
    asked += [Step(0, count, start) for start in (0, 736, 1472) for count in (size // 4, size // 2, size)]
    return [replace(step, seconds=seconds(times, step)) for step in asked]


def test_pairs_of_a_chunk() -> None:
    assert Step(1.0, prompt_tokens=3, start=10).pairs == 11 + 12 + 13


@pytest.mark.parametrize(
    "times",
    [
        CPU,
        H100_8B,
        replace(CPU, pair_s=0.0),
        replace(CPU, overhead_s=0.0),
        # Even a few decodes take longer than the weights: the first guess is wrong for them.
        replace(CPU, weights_s=0.003),
    ],
)
def test_known_times_are_found(times: ServiceTimes) -> None:
    found = fit(measured(times), times.step_tokens, times.max_running)
    wanted, got = asdict(times), asdict(found.times)
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
    assert (found.error < 1e-9, found.steps) == (True, 18)


def test_noise_moves_the_times_little() -> None:
    rng = random.Random(3)
    noisy = [replace(step, seconds=step.seconds * rng.uniform(0.95, 1.05)) for _ in range(5) for step in measured(CPU)]
    found = fit(noisy, 256, 32)
    for name in ("token_s", "pair_s", "context_token_s"):
        assert asdict(found.times)[name] == pytest.approx(asdict(CPU)[name], rel=0.15)
    assert 0.005 < found.error < 0.05


def test_no_time_is_negative() -> None:
    """Steps that get shorter with their context: whatever explains them, it is nothing that a replay cannot run."""
    shrinking = [replace(step, seconds=0.02 - 1e-7 * step.context_tokens) for step in measured(CPU)]
    times = fit(shrinking, 256, 32).times
    assert min(times.pair_s, times.context_token_s, times.overhead_s, times.weights_s) >= 0


def test_limits_that_no_replay_takes_are_refused() -> None:
    with pytest.raises(ReplayError, match="step_tokens"):
        fit(measured(CPU), 16, 32)


def test_a_replay_reads_what_is_written(tmp_path: Path) -> None:
    found = fit(measured(CPU), 256, 32)
    file = tmp_path / "calibration.json"
    file.write_text("an older one", encoding="utf-8")
    told = {"machine": {"cpu_model": "a processor"}}
    write(file, found, comment(Plan(), told, found))
    assert read(file) == found.times
    said = " ".join(json.loads(file.read_text(encoding="utf-8"))["comment"])
    assert "18 kinds of steps" in said
    assert "a processor" in said
    assert "64, 512, 1500" in said
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match=r"Cannot write .*taken.*--calibrate"):
        write(tmp_path / "taken", Fit(CPU, 0.0, 1), [])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
