"""The engine benchmark's arithmetic: tokens a second while all streams decode, and the ceiling that memory sets.

A stream is a list of marks (moment in ns, tokens so far). A measurement counts from the moment when the last of the streams
has its first token behind it to the moment when the first of them ends; between two marks tokens are taken to come evenly, so
streams of two engines, whose steps do not end together, can be counted over one span.

The ceiling is what a machine that did nothing but read would reach: every step reads the weights and the K and V of all
contexts once, at the bandwidth measured at the same time. Two engines read the weights twice.

Limits: the weights of a mixture of experts count as if every step read all of them, the contexts of a model with sliding
windows as if it had none, so its fractions look better or worse than they are.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from cluster.bench.engine_plan import SKIPPED
from cluster.bench.pool_process import BenchFailed

Marks = Sequence[tuple[int, int]]
Result = TypeVar("Result")
_LONGER: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step of the model reads and computes.

    `weight_bytes`: of all weights but an input embedding that is a table of its own. `linear_parameters`: of the linear layers,
    the last one (lm_head) left out. `token_bytes`: K and V of one token.
    """

    weight_bytes: int
    linear_parameters: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Steady:
    """What streams did together: `tokens` of all of them in `seconds`; `generated` is the mean a stream had by then."""

    tokens: float
    seconds: float
    generated: float

    @property
    def tokens_per_s(self) -> float:
        """Of all streams."""
        return self.tokens / self.seconds


class NeverTogether(BenchFailed):
    """No moment at which all streams decoded."""


def until_together(attempt: Callable[[int], Result], steps: int) -> Result:
    """What `attempt` makes of streams of `steps` steps, or of more where these end before all have begun.

    Raises NeverTogether where even `_LONGER` times as many are too few.
    """
    for factor in _LONGER[:-1]:
        with contextlib.suppress(NeverTogether):
            return attempt(steps * factor)
    return attempt(steps * _LONGER[-1])


def steady(streams: Sequence[Marks]) -> Steady:
    """What `streams` did while all of them decoded. Raises NeverTogether."""
    begin = max(marks[min(SKIPPED, len(marks) - 1)][0] for marks in streams)
    end = min(marks[-1][0] for marks in streams)
    if end <= begin:
        raise NeverTogether(
            f"{len(streams)} sequences never decoded together, so there is nothing to measure: take more --steps, or a "
            "smaller --batch."
        )
    spans = [(tokens_at(marks, begin), tokens_at(marks, end)) for marks in streams]
    tokens = sum(last - first for first, last in spans)
    return Steady(tokens, (end - begin) / 1e9, sum(first + last for first, last in spans) / 2 / len(spans))


def tokens_at(marks: Marks, moment_ns: int) -> float:
    """Tokens of a stream at a moment between its first and its last mark."""
    after = bisect_right(marks, moment_ns, key=lambda mark: mark[0])
    if after == len(marks):
        return float(marks[-1][1])
    (from_ns, had), (to_ns, has) = marks[after - 1], marks[after]
    return had + (has - had) * (moment_ns - from_ns) / (to_ns - from_ns)


def ceiling_tok_s(shape: Shape, batch: int, engines: int, context_tokens: float, bandwidth_gb_s: float) -> float:
    """Tokens a second of `batch` sequences on `engines` if reading were all they did."""
    read_bytes = engines * shape.weight_bytes + batch * context_tokens * shape.token_bytes
    return batch * bandwidth_gb_s * 1e9 / read_bytes


def linear_share(shape: Shape, prompt_tokens: int, seconds: float, gemm_gflops: float) -> float:
    """GFLOP/s of the linear layers over a whole prompt's `seconds`, attention and all else included, over `gemm_gflops`."""
    return 2 * shape.linear_parameters * prompt_tokens / seconds / 1e9 / gemm_gflops
