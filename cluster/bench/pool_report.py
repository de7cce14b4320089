"""The pool benchmark's report as tables and sentences for a person."""

from __future__ import annotations

from typing import Any, Final

from cluster.bench.report import BUSY

FIGURES: Final = ["MEASURE", "VALUE", "WHAT"]
TIDY: Final = ["TIDY PART", "DAMAGED BLOCKS", "UNUSABLE BEFORE", "AFTER ONE PASS", "PASS"]

_MEANINGS: Final = {
    "pairs_per_s_1": "16 blocks taken and given back, one process",
    "pairs_per_s_2": "two processes on one region, together",
    "flock_pairs_per_s_2": "the same, each operation under one flock",
    "python_pool_pairs_per_s": "a pool in plain Python, one process",
    "ns_per_block": "of pairs_per_s_1",
    "match_1000_us": "one request matches 1,000 indexed blocks",
    "reclaim_10000_ms": "taking back 10,000 blocks of a killed process",
    "cas_retry_share": "of the compare-and-swaps of two processes",
    "pairs_2_over_1": "second process",
    "over_flock": "two processes, against the lock",
    "over_python": "one process, against plain Python",
}


def figure_rows(told: dict[str, Any]) -> list[list[str]]:
    """Rows under FIGURES."""
    return [[name, _number(told[name]), what] for name, what in _MEANINGS.items()]


def tidy_rows(told: dict[str, Any]) -> list[list[str]]:
    """Rows under TIDY."""
    return [
        [
            part,
            str(found["damaged_blocks"]),
            str(found["unusable_before"]),
            str(found["unusable_after"]),
            f"{found['pass_ms']:.2f} ms",
        ]
        for part, found in told["tidy"].items()
    ]


def startup(told: dict[str, Any]) -> str:
    """How the region of the usual size started, in a sentence."""
    found = told["startup"]
    if "skipped" in found:
        return f"Start of a large region: left out, {found['skipped']}."
    return (
        f"Start of a region of {found['bytes'] / 1e9:.2f} GB: made in {found['create_s']:.2f} s, joined in "
        f"{found['attach_s']:.2f} s; its control part is {found['control_share']:.2%} of it."
    )


def setting(told: dict[str, Any]) -> str:
    """What was run, and on what."""
    machine = told["machine"]
    cores = told["cores"]
    pinned = "not pinned, there is but one core" if None in cores else f"pinned to cores {', '.join(map(str, cores))}"
    return (
        f"{told['capacity_blocks']} blocks, median of {told['rounds']} x {told['seconds']:g} s, processes {pinned}; "
        f"{machine['cpus']} CPUs, {machine['cpu_model']}"
    )


def doubt(told: dict[str, Any]) -> str:
    """What makes the figures doubtful, in a sentence; empty when nothing does."""
    load = told["load_before"]
    if load <= BUSY:
        return ""
    return (
        f"The machine was busy before this run (load average {load:.1f}), so the figures are too low and two processes look "
        "less of a gain than they are: measure again when it is idle."
    )


def _number(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
