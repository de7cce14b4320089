"""Prompt tokens a second of each candidate, as far as it can be told from the others'.

Rates are measured and vary with what a replica happened to compute. Were they taken at their word, the luckiest of equal replicas
would get every new prefix. So a rate counts only by what it differs from the (geometric) mean beyond a tolerance, without
a jump at its edge; one that has not been measured is the mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from router.route_config import RouteConfig
from router.view import FloatColumn, View


class _Settled(NamedTuple):
    measured: FloatColumn
    interference_s: FloatColumn
    config: RouteConfig
    found: tuple[FloatColumn, FloatColumn]


_last: _Settled | None = None
"""What was asked for last. The same columns come with many requests, and looking at them costs more than all the rest."""


def settled(view: View, config: RouteConfig) -> tuple[FloatColumn, FloatColumn]:
    """Returns the rates, and the seconds that each running decode adds. Remembers the last answer by the columns themselves, if
    they cannot change.
    """
    global _last
    measured, each_s, last = view.prefill_tokens_per_s, view.decode_interference_s, _last
    if last is not None and last.measured is measured and last.interference_s is each_s and last.config is config:
        return last.found
    found = settled_rates(measured, config), np.where(np.isnan(each_s), config.decode_interference_s, each_s)
    if not (measured.flags.writeable or each_s.flags.writeable):
        _last = _Settled(measured, each_s, config, found)
    return found


def settled_rates(measured: FloatColumn, config: RouteConfig) -> FloatColumn:
    """Returns tokens a second, all above 0. `measured`: 0 where nothing is known. Raises ValueError for no candidates."""
    least = float(measured.min())
    if least == float(measured.max()):
        return np.full(len(measured), least if least > 0 else config.prefill_tokens_per_s)
    if least <= 0:
        known = measured > 0
        logs = np.log(np.where(known, measured, 1.0))
        mean = math.exp(float(np.add.reduce(logs)) / np.count_nonzero(known))  # those not known add nothing
        measured = np.where(known, measured, mean)
    else:
        mean = math.exp(float(np.add.reduce(np.log(measured))) / len(measured))
    tolerated = 1.0 + config.rate_tolerance
    rates: FloatColumn = measured / np.minimum(np.maximum(measured / mean, 1.0 / tolerated), tolerated)
    return rates
