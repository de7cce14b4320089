"""Service times for `kvatlas replay`, from steps that were measured.

The replay's model of a step (`router/replay/service_times.py`) is linear in its five times once it is known of each step
whether its tokens or the reading of the weights decide. So: guess (steps with prompt tokens are decided by their tokens, the
others by the weights), solve, see which steps the found times put on the other side, and solve again until none moves.

Each solution makes the squares of the relative errors least, over times that are not negative: a time that would be is set to 0
and the others are found anew. `error` of a fit is the median of its relative errors.

Limits: needs prompts of different sizes and starts, and decodes of different contexts; a machine on which a step of many decodes
costs more than one of a few, although the weights decide, is told as good as this model can.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cluster.bench.engine_plan import Plan
from cluster.errors import UsageError
from router.replay.service_times import LIMITS, ServiceTimes

_TIMES: Final = ("token_s", "pair_s", "weights_s", "context_token_s", "overhead_s")
_TRIES: Final = 20

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step: `prompt_tokens` from position `start` of one prompt, or `decodes` with `context_tokens` in all."""

    seconds: float
    prompt_tokens: int = 0
    start: int = 0
    decodes: int = 0
    context_tokens: float = 0.0

    @property
    def tokens(self) -> int:
        """That are computed."""
        return self.prompt_tokens + self.decodes

    @property
    def pairs(self) -> float:
        """(query, key) pairs of the prompt tokens."""
        return self.prompt_tokens * (self.start + (self.prompt_tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class Fit:
    """The times, and how far the measured steps are from them: the median of the relative differences over so many steps."""

    times: ServiceTimes
    error: float
    steps: int


def fit(steps: Sequence[Step], step_tokens: int, max_running: int) -> Fit:
    """The times that explain `steps` best. Raises ReplayError where they cannot be simulated."""
    seconds = np.array([step.seconds for step in steps])
    by_tokens = np.array([step.prompt_tokens > 0 for step in steps])
    found = _solved(steps, by_tokens, seconds)
    for _ in range(_TRIES):
        token_s, weights_s = found[0], found[2]
        decided = np.array([step.tokens * token_s > weights_s for step in steps])
        if (decided == by_tokens).all():
            break
        by_tokens = decided
        found = _solved(steps, by_tokens, seconds)
    least = [LIMITS[name][0] for name in _TIMES]
    times = {name: float(max(low, value)) for name, low, value in zip(_TIMES, least, found, strict=True)}
    explained = _columns(steps, by_tokens) @ found
    error = float(np.median(np.abs(explained / seconds - 1)))
    return Fit(ServiceTimes(**times, step_tokens=step_tokens, max_running=max_running), error, len(steps))


def _columns(steps: Sequence[Step], by_tokens: npt.NDArray[np.bool_]) -> Floats:
    """What each of `_TIMES` is multiplied by, a row for each step."""
    rows = [
        (step.tokens if own else 0.0, step.pairs, 0.0 if own else 1.0, step.context_tokens, 1.0)
        for step, own in zip(steps, by_tokens, strict=True)
    ]
    return np.array(rows, np.float64)


def _solved(steps: Sequence[Step], by_tokens: npt.NDArray[np.bool_], seconds: Floats) -> Floats:
    relative = _columns(steps, by_tokens) / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)  # pairs are many, steps few
    used = np.ones(len(_TIMES), bool)
    found = np.zeros(len(_TIMES))
    while used.any():
        found[:] = 0.0
        found[used] = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(steps)), rcond=None)[0]
        if (found >= 0).all():
            break
        used &= found > found.min()
    solution: Floats = found / scale
    return solution


def comment(plan: Plan, told: Mapping[str, Any], found: Fit) -> list[str]:
    """What the file says of how its times were found; `told` is the benchmark's report."""
    machine = told["machine"]
    return [
        f"Service times of one replica for `kvatlas replay`, measured by `kvatlas bench engine --grid --calibrate`: model "
        f"{plan.model}, {plan.mode} mode, {plan.threads} threads, {machine['cpu_model']}.",
        "A step takes overhead_s + max(weights_s, (prompt tokens + decodes) x token_s) + pairs x pair_s + context x "
        "context_token_s.",
        f"Fitted by least squares of relative errors to medians of {found.steps} kinds of steps: decodes of "
        f"{_list(plan.batches)} sequences with contexts of {_list(plan.contexts)} tokens, and prompts of up to step_tokens "
        f"tokens behind cached beginnings of several lengths. Half of them are within {found.error:.1%} of what these times "
        "give.",
        "step_tokens and max_running are those of the engine.",
    ]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def write(file: Path, found: Fit, comment: Sequence[str]) -> None:
    """Writes a calibration for `kvatlas replay --calibration`, whole or not at all. Raises UsageError."""
    record: dict[str, Any] = {"comment": list(comment), **asdict(found.times)}
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, file)
    except OSError as error:
        raise UsageError(f"Cannot write {file} ({error.strerror}): check --calibrate.") from error
    finally:
        beside.unlink(missing_ok=True)
