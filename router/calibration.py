"""How long replicas take, learned from the first tokens they answer with.

The time to a request's first token is taken to be

    (prompt tokens queued before it + its own not cached) x a  +  decodes running x b  +  c,      all x f of the replica

`a`, `b` and `c` are the same for all replicas and fitted by recursive least squares, in logarithms: what a first token was late
or early by, as the logarithm of a ratio, is divided among the logarithms of the three by their shares of the time that was
predicted, and by how much is known of each. So 2 times too long and 2 times too short weigh the same, a long prompt counts no
more than a short one, and nothing gets negative. What is known fades: the last fifty answers count. It never fades to
less than it was in the beginning, so what the requests do not tell apart stays where it was and nothing winds up however long
they all look alike. `f` moves, with a gain that falls with the number of answers, towards what a replica takes more or less than
the others; the mean of its logarithm is 0.

Robust. A time that is off by more than `CLIP` usual errors counts as off by that much only, and the less the further off it is.
The usual error is a running median, which stragglers do not move. A lasting change raises it within some twenty answers and is
then believed, the sooner because every such time makes what was known fade faster. Zero, negative, infinite or not a
number: ignored. Estimates stay within a factor of 1,000 of where they began.

Also learned: how much of the prompts is found cached, which says how likely it is that a cached token is asked for again.

Limits: no units but seconds and tokens, so work that grows with the square of a prompt is averaged over. The requests of
one router are all it sees; two routers may differ. Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from router.route_config import RouteConfig
from router.view import FloatColumn

KEEP: Final = 0.98
"""What is kept of what is known at each first token."""
KEEP_SURPRISED: Final = 0.9
"""The same at one that was off by more than is believed."""
BELIEF: Final = 0.3
"""What the beginning knows of each of the three, in answers that depended on nothing else."""
FIXED_S: Final = 0.01
"""Where c begins."""
SPAN: Final = math.log(1000.0)

USUAL_ERROR: Final = (0.05, 0.5, 2.0)
"""Least, first and largest usual error, as a logarithm."""
CLIP: Final = 2.5
ERROR_GAIN: Final = 0.3
MEDIAN: Final = 0.6745
"""The median of the absolute values of a bell curve, in its deviations."""

FACTOR_BELIEF: Final = 4.0
"""Answers that outweigh the belief that a replica is like the others, and what it says of its own rate."""
FACTOR_MOST: Final = 30.0
FACTOR_SPAN: Final = math.log(100.0)

REUSE_KEEP: Final = 0.995
REUSE_BELIEF: Final = 20.0
"""Prompts that outweigh the configured share."""

_LEAST_S: Final = 1e-3
_MOST_TOKENS: Final = 1e12


class Rates(NamedTuple):
    """Columns of a view."""

    prefill_tokens_per_s: FloatColumn
    decode_interference_s: FloatColumn


class Calibration:
    """See above. `version` rises whenever what is known changes."""

    def __init__(self, config: RouteConfig) -> None:
        self.version = 0
        self._begin = [
            math.log(1.0 / config.prefill_tokens_per_s),
            math.log(max(config.decode_interference_s, _LEAST_S / 10)),
            math.log(FIXED_S),
        ]
        self._logs = list(self._begin)
        """Of a, b, c."""
        self._known = _nothing_known()
        self._usual_error = USUAL_ERROR[1]
        self._noted = 0
        self._measured_s = 0.0
        self._reuse_share = config.reuse_share
        self._reused = self._asked = 0.0
        self._rows: dict[str, int] = {}
        self._log_factors: FloatColumn = np.zeros(0)
        self._answers: FloatColumn = np.zeros(0)
        self._asked_for: tuple[Sequence[str], int, npt.NDArray[np.int64]] = ((), 0, np.zeros(0, np.int64))

    def note(
        self, replica_id: str, queued_tokens: float, uncached_tokens: float, running: float, ttft_s: float
    ) -> None:
        """A first token came from `replica_id`, `ttft_s` seconds after the request was sent there.

        `queued_tokens`, `running`: what the decision saw there, before this request. `uncached_tokens`: of the request's own
        prompt.
        Ignores what no request has: numbers that are negative or not finite, no time at all.
        """
        tokens = queued_tokens + uncached_tokens
        given = (queued_tokens, uncached_tokens, running, ttft_s)
        if not all(math.isfinite(number) and number >= 0 for number in given) or ttft_s <= 0:
            return
        if tokens > _MOST_TOKENS or running > _MOST_TOKENS:
            return
        if not self._noted and self._measured_s:
            self._begin[0] = self._logs[0] = math.log(self._measured_s)
        self._noted += 1
        self.version += 1
        row = self._row(replica_id)
        a, b, c = self._abc
        tokens_s, running_s = tokens * a, running * b
        predicted_s = tokens_s + running_s + c
        error = math.log(ttft_s / predicted_s) - float(self._log_factors[row])
        most = CLIP * self._usual_error
        clipped = max(-most, min(most, error))
        weight = clipped / error if error else 1.0
        self._learn_error(error)
        self._fit(tokens_s / predicted_s, running_s / predicted_s, c / predicted_s, clipped, weight)
        self._learn_factor(row, clipped * weight)

    def note_reuse(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A replica found `cached_tokens` of a prompt cached. Ignores numbers that no prompt has."""
        if prompt_tokens > 0 and 0 <= cached_tokens <= prompt_tokens:
            self._reused = self._reused * REUSE_KEEP + cached_tokens
            self._asked = self._asked * REUSE_KEEP + prompt_tokens

    def rates(self, replica_ids: Sequence[str], measured_tokens_per_s: FloatColumn | None = None) -> Rates:
        """Returns the columns for these candidates, all positive.

        `measured_tokens_per_s`: what the replicas themselves measured, 0 where nothing. It is what is believed of a replica until
        some answers of its own have told; the mean is where `a` begins if it comes before the first answer.
        `replica_ids`: give the same tuple as long as the candidates are the same, and they are looked up only once.
        """
        rows = self._rows_of(replica_ids)
        known_rows = np.maximum(rows, 0)
        is_known = rows >= 0
        if len(self._answers):
            answers = np.where(is_known, self._answers[known_rows], 0.0)
            log_factors = np.where(is_known, self._log_factors[known_rows], 0.0)
        else:
            answers = log_factors = np.zeros(len(rows))
        factors = np.exp(log_factors)
        log_s = self._logs[0] + log_factors
        if measured_tokens_per_s is not None and len(rows):
            is_measured = (measured_tokens_per_s > 0) & (measured_tokens_per_s < math.inf)
            if is_measured.any():
                measured_log_s = -np.log(np.where(is_measured, measured_tokens_per_s, 1.0))
                if not self._noted:
                    self._measured_s = math.exp(float(measured_log_s.sum()) / int(is_measured.sum()))
                    log_s = np.full(len(rows), math.log(self._measured_s))
                told = np.where(is_measured, answers / (answers + FACTOR_BELIEF), 1.0)
                log_s = told * log_s + (1.0 - told) * measured_log_s
        rates = Rates(np.exp(-log_s), math.exp(self._logs[1]) * factors)
        for column in rates:
            column.setflags(write=False)  # they are given to many requests
        return rates

    @property
    def reuse_share(self) -> float:
        """How much of the prompts was found cached lately, 0 to 1; the configured share while there were few."""
        if not self._asked:
            return self._reuse_share
        # A prompt of mean length is worth one.
        believed = self._asked * (1 - REUSE_KEEP) * REUSE_BELIEF
        return (self._reused + believed * self._reuse_share) / (self._asked + believed)

    def keep_replicas(self, replica_ids: Collection[str]) -> None:
        """Forgets all other replicas."""
        kept = [(replica_id, row) for replica_id, row in self._rows.items() if replica_id in replica_ids]
        if len(kept) < len(self._rows):
            rows = [row for _, row in kept]
            self._rows = {replica_id: row for row, (replica_id, _) in enumerate(kept)}
            self._log_factors, self._answers = self._log_factors[rows], self._answers[rows]
            self._asked_for = ((), 0, np.zeros(0, np.int64))
            self.version += 1

    def report(self) -> dict[str, Any]:
        """Everything, ready for JSON. `factors`: by how much a replica takes longer than the mean of all."""
        a, b, c = self._abc
        return {
            "first_tokens": self._noted,
            "prefill_tokens_per_s": 1.0 / a,
            "decode_interference_s": b,
            "fixed_s": c,
            "usual_error": math.expm1(self._usual_error),
            "reuse_share": self.reuse_share,
            "factors": {replica_id: math.exp(self._log_factors[row]) for replica_id, row in self._rows.items()},
        }

    @property
    def _abc(self) -> tuple[float, float, float]:
        a, b, c = self._logs
        return math.exp(a), math.exp(b), math.exp(c)

    def _learn_error(self, error: float) -> None:
        """Moves the usual error a step towards where half of the errors are above its median."""
        least, _, most = USUAL_ERROR
        step = ERROR_GAIN * (0.5 if abs(error) > MEDIAN * self._usual_error else -0.5)
        self._usual_error = min(most, max(least, self._usual_error * math.exp(step)))

    def _fit(self, x: float, y: float, z: float, error: float, weight: float) -> None:
        """Divides `error` among the logarithms of a, b and c, whose shares of the prediction are x, y and z."""
        keep = KEEP if weight == 1.0 else KEEP_SURPRISED
        news = (x * x, x * y, x * z, y * y, y * z, z * z)
        self._known = [
            keep * old + (1.0 - keep) * least + weight * new
            for old, least, new in zip(self._known, _nothing_known(), news, strict=True)
        ]
        steps = _solved(self._known, (x * weight * error, y * weight * error, z * weight * error))
        self._logs = [
            max(begin - SPAN, min(begin + SPAN, log + step))
            for log, step, begin in zip(self._logs, steps, self._begin, strict=True)
        ]

    def _learn_factor(self, row: int, error: float) -> None:
        self._answers[row] = min(self._answers[row] + 1.0, FACTOR_MOST)
        moved = self._log_factors[row] + error / (self._answers[row] + FACTOR_BELIEF)
        self._log_factors[row] = max(-FACTOR_SPAN, min(FACTOR_SPAN, moved))
        self._log_factors -= float(self._log_factors @ self._answers) / float(self._answers.sum())

    def _row(self, replica_id: str) -> int:
        row = self._rows.get(replica_id)
        if row is None:
            row = self._rows[replica_id] = len(self._rows)
            self._log_factors = np.append(self._log_factors, 0.0)
            self._answers = np.append(self._answers, 0.0)
        return row

    def _rows_of(self, replica_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Returns the row of each replica, -1 for those that have not answered yet."""
        asked_for, rows_then, rows = self._asked_for
        if asked_for is not replica_ids or rows_then != len(self._rows) or not isinstance(replica_ids, tuple):
            rows = np.array([self._rows.get(replica_id, -1) for replica_id in replica_ids], np.int64)
            self._asked_for = (replica_ids, len(self._rows), rows)
        return rows


def _nothing_known() -> list[float]:
    """Returns the upper triangle, by rows, of the matrix that says how much is known of the three, to begin with."""
    return [BELIEF, 0.0, 0.0, BELIEF, 0.0, BELIEF]


def _solved(matrix: Sequence[float], right: tuple[float, float, float]) -> tuple[float, float, float]:
    """Returns the solution of a symmetric system of three, given by its upper triangle; the matrix is positive definite."""
    xx, xy, xz, yy, yz, zz = matrix
    p, q, r = right
    # The adjugate is symmetric as well.
    ax, ay, az = yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - xz * yy
    by, bz, cz = xx * zz - xz * xz, xy * xz - xx * yz, xx * yy - xy * xy
    whole = xx * ax + xy * ay + xz * az
    return (
        (ax * p + ay * q + az * r) / whole,
        (ay * p + by * q + bz * r) / whole,
        (az * p + bz * q + cz * r) / whole,
    )
