"""What one run, and several of them, come to in figures.

    hit                       prompt tokens found cached / prompt tokens
    ttft_p50_s, p95, p99      from arrival to the first token, all requests
    imbalance                 most prompt tokens computed by a replica / mean over replicas
    cov                       standard deviation of the same / mean
    phantom_tokens            listed by the directory at the decision and not found by the replica
    duplicate_prefill_tokens  computed, though one cache that keeps everything would have had them
    rejects                   requests larger than a pool, refused
    decide_p99_us             wall time of a decision, from the ticket's keys to the ranking, on this machine
    decide_cpu_p99_us         processor time of the same, which others on the machine do not lengthen

Of several seeds the median counts, for each figure by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from router.replay.simulation import Outcome, Plan
from router.replay.trace import Trace

ARRIVALS: Final = "requests of one timestamp are spread evenly over the time to the next timestamp"
_TEXTS: Final = ("policy", "control", "arrivals")

Figures = dict[str, Any]


def figures(plan: Plan, load: float, control: str, trace: Trace, outcome: Outcome) -> Figures:
    """Returns the figures of one run of `trace`, which arrives at `load` times the rate of saturation."""
    taken = outcome.replica >= 0
    given = trace.input_tokens[taken]
    cached = outcome.cached_tokens[taken]
    computed = outcome.computed_tokens.astype(np.float64)
    mean = max(1.0, float(computed.mean()))
    totals = outcome.router_totals
    ttft = _percentiles(outcome.ttft_s[taken])
    return {
        "policy": plan.policy,
        "replicas": plan.replicas,
        "routers": plan.routers,
        "load": load,
        "pool_tokens": plan.pool_tokens,
        "hit": int(cached.sum()) / max(1, int(given.sum())),
        "ttft_p50_s": ttft[0],
        "ttft_p95_s": ttft[1],
        "ttft_p99_s": ttft[2],
        "imbalance": float(computed.max()) / mean,
        "cov": float(computed.std()) / mean,
        "phantom_tokens": totals.get("phantom_tokens", 0),
        "duplicate_prefill_tokens": max(0, int(trace.reusable_tokens()[taken].sum() - cached.sum())),
        "rejects": int((~taken).sum()),
        "decide_p99_us": 1e6 * float(np.percentile(outcome.decide_s, 99)),
        "decide_p50_us": 1e6 * float(np.percentile(outcome.decide_s, 50)),
        "decide_cpu_p99_us": 1e6 * float(np.percentile(outcome.decide_cpu_s, 99)),
        "ttft_mean_s": float(np.mean(outcome.ttft_s[taken])) if taken.any() else None,
        "unkept_tokens": totals.get("unkept_tokens", 0),
        "evicted_blocks": outcome.evicted_blocks,
        "fallbacks": outcome.fallbacks,
        "requests": len(trace),
        "arrivals_per_s": len(trace) / trace.length_s,
        "hit_of_one_cache": int(trace.reusable_tokens().sum()) / int(trace.input_tokens.sum()),
        "lag_ms": 1e3 * plan.lag_s,
        "control": control,
        "arrivals": ARRIVALS,
    }


def medians(runs: Sequence[Figures]) -> Figures:
    """Returns the median of each figure over runs that differ in their seed only; `seeds` says of how many."""
    first = runs[0]
    told: Figures = {}
    for name, value in first.items():
        values = [run[name] for run in runs]
        if name in _TEXTS or None in values:
            told[name] = value
            continue
        middle = statistics.median(values)
        told[name] = round(middle) if isinstance(value, int) else middle
    return told | {"seeds": len(runs)}


HEAD: Final = (
    *("LOAD", "POLICY", "HIT", "TTFT P50", "P95", "P99"),
    *("IMBALANCE", "COV", "PHANTOM", "DUPLICATE", "REJECTS", "DECIDE P99"),
)


LEGEND: Final = """\
HIT         share of prompt tokens found cached           TTFT       from arrival to the first token
IMBALANCE   prompt tokens computed by the busiest replica / mean over replicas (1: even)
COV         standard deviation of the same / mean (0: even)
PHANTOM     tokens that the directory listed when a request was decided and its replica did not have
DUPLICATE   tokens computed that one cache which keeps everything would have had
REJECTS     requests larger than a pool, refused and in no other figure
DECIDE P99  time to decide, on this machine"""


def rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns rows under `HEAD`, the units first."""
    told = [["", "", "", "s", "s", "s", "max/mean", "std/mean", "tokens", "tokens", "", "us"]]
    for run in runs:
        row = [f"{run['load']:g}", run["policy"], f"{run['hit']:.3f}"]
        row += ["-" if run[name] is None else f"{run[name]:.3f}" for name in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s")]
        row += [f"{run['imbalance']:.3f}", f"{run['cov']:.3f}"]
        row += [f"{run[name]:,}" for name in ("phantom_tokens", "duplicate_prefill_tokens", "rejects")]
        told.append([*row, f"{run['decide_p99_us']:.0f}"])
    return told


def setting(run: Mapping[str, Any]) -> str:
    """Returns what all runs have in common, in two sentences."""
    pools = "that keeps everything" if run["replicas"] == 1 else "that keep everything"
    if run["pool_tokens"] is not None:
        pools = f"of {_count(run['pool_tokens'], 'token')}"
    control = "" if run["control"] == "none" else f", control {run['control']}"
    of_seeds = "one seed" if run["seeds"] == 1 else f"median of {run['seeds']:,} seeds"
    return (
        f"{_count(run['requests'], 'request')}, {_count(run['replicas'], 'replica')} with "
        f"{'a pool' if run['replicas'] == 1 else 'pools'} {pools}, {_count(run['routers'], 'router')}, what is known is "
        f"{run['lag_ms']:g} ms old, {of_seeds}{control};\n{ARRIVALS}.\n"
        f"One cache that keeps everything would hit {run['hit_of_one_cache']:.3f}; load 1 is the rate at which the work "
        f"it leaves\nequals what the replicas can do."
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _percentiles(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
    if not len(seconds):
        return [None, None, None]
    return [float(one) for one in np.percentile(seconds, (50, 95, 99))]
