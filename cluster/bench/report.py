"""Runs as they are printed: a table with a column for each, the machine they ran on, and what in them does not add up."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUSY = 0.5
"""Load average, over a minute, from which on others take a noticeable part of two cores."""
BY_REPLICA = ["POLICY", "REPLICA", "REQUESTS", "PROMPT TOKENS", "CACHED"]


def was_busy(load_before: float) -> str:
    """Why figures measured after such a load average are doubtful, in a sentence."""
    return (
        f"The machine was busy before this run (load average {load_before:.1f}), so the figures are worse than they could be: "
        "measure again when it is idle."
    )


def table(runs: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: one row for each measure, one column for each run. Needs at least one run."""
    rows = [[name, *(_cell(run[name]) for run in runs)] for name in runs[0] if name not in ("policy", "by_replica")]
    return ["MEASURE", *(run["policy"] for run in runs)], rows


def replica_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows under `BY_REPLICA`: how each run's requests and hits spread over its replicas."""
    return [
        [
            run["policy"],
            entry["replica_id"],
            str(entry["requests"]),
            str(entry["prompt_tokens"]),
            f"{entry['cached_tokens']} ({entry['cached_tokens'] / max(1, entry['prompt_tokens']):.0%})",
        ]
        for run in runs
        for entry in run["by_replica"]
    ]


def doubt(run: dict[str, Any]) -> str:
    """What makes the run's hit rate doubtful, in a sentence; empty when replicas and responses agree or cannot be compared."""
    counted = (run["replica_hit_tokens"], run["replica_queried_tokens"])
    told = (run["cached_tokens"], run["prompt_tokens"])
    if run["errors"] or None in counted or counted == told:
        return ""
    return (
        f"{run['policy']}: the replicas counted {counted[0]} of {counted[1]} prompt tokens as cached, the responses say "
        f"{told[0]} of {told[1]}: measure again while nobody else uses the server."
    )


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """`cpus` that this process may use, and the processor's name as far as the kernel tells it."""
    return {"cpus": len(os.sched_getaffinity(0)), "cpu_model": _cpu_model(cpuinfo)}


def _cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine() or "unknown"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(str(item) for item in value) or "-"
    return str(value)
