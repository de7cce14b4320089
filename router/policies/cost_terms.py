"""The arithmetic of `cost` over all candidates in one pass, as machine code: two dozen numpy calls cost more than all the rest of
a decision.

Compiled when it is imported, from numba's cache if it is there; nothing outside this file is part of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from numba import njit

from router.view import FloatColumn, IntColumn

TERMS: Final = ("queue_s", "prefill_s", "decode_s", "recompute_s", "displaced_s", "balance_s", "displaced_tokens")
"""The rows that `fill` writes after the score."""
_INT = "int64[::1]"
_FLOAT = "float64[::1]"


@njit(
    f"void(float64[:,::1], {_INT}, {_INT}, {_INT}, {_INT}, {_INT}, {_INT}, {_FLOAT}, {_FLOAT}, "
    "int64, int64, float64, float64, float64, float64)",
    cache=True,
)
def _fill(
    out: npt.NDArray[np.float64],
    cached: IntColumn,
    queued: IntColumn,
    running: IntColumn,
    waiting: IntColumn,
    free: IntColumn,
    held: IntColumn,
    rates: FloatColumn,
    each_s: FloatColumn,
    prompt_tokens: int,
    output_tokens: int,
    recompute_weight: float,
    recompute_limit: float,
    displaced_weight: float,
    balance_weight: float,
) -> None:
    n = len(cached)
    wait, least = 0.0, held[0]
    for i in range(n):
        wait += waiting[i]
        least = min(least, held[i])
    weight = min(recompute_limit, recompute_weight * (1.0 + wait / n))
    for i in range(n):
        rate = rates[i]
        uncached = max(prompt_tokens - cached[i], 0)
        displaced = max(uncached + output_tokens - free[i], 0)
        out[1, i] = queued[i] / rate
        out[2, i] = uncached / rate
        out[3, i] = running[i] * each_s[i]
        out[4, i] = out[2, i] * weight
        out[5, i] = displaced / rate * displaced_weight
        out[6, i] = (held[i] - least) / rate * balance_weight
        out[7, i] = displaced
        out[0, i] = out[1, i] + out[2, i] + out[3, i] + out[4, i] + out[5, i] + out[6, i]


def fill(
    cached: IntColumn,
    queued: IntColumn,
    running: IntColumn,
    waiting: IntColumn,
    free: IntColumn,
    held: IntColumn,
    rates: FloatColumn,
    each_s: FloatColumn,
    *,
    prompt_tokens: int,
    output_tokens: int,
    recompute_weight: float,
    recompute_limit: float,
    displaced_weight: float,
    balance_weight: float,
) -> npt.NDArray[np.float64]:
    """Returns the score and then TERMS, one row each. Columns of a `View` of at least one candidate; weights as in
    `RouteConfig`, that of what is displaced times the share that is asked for again.
    """
    out = np.empty((1 + len(TERMS), len(cached)))
    weights = (prompt_tokens, output_tokens, recompute_weight, recompute_limit, displaced_weight, balance_weight)
    try:
        _fill(out, cached, queued, running, waiting, free, held, rates, each_s, *weights)
    except TypeError:  # columns of another type or not side by side in memory, which costs less to find out than to ask
        ints = [np.ascontiguousarray(column, np.int64) for column in (cached, queued, running, waiting, free, held)]
        floats = [np.ascontiguousarray(column, np.float64) for column in (rates, each_s)]
        _fill(out, *ints, *floats, *weights)
    return out
