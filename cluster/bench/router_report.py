"""The router benchmark's report as a table and sentences for a person."""

from __future__ import annotations

from typing import Any, Final

from cluster.bench.report import BUSY, was_busy

FIGURES: Final = ["MEASURE", "VALUE", "WHAT"]

_MEANINGS: Final = {
    "lookup_p50_us": "one prompt of 1,000 blocks in the mirror, never asked about before",
    "lookup_p99_us": "the slowest of a hundred",
    "apply_blocks_per_s": "blocks of batches into the mirror, digest included",
    "bytes_per_entry": "memory of the mirror for each key",
    "decide64_p50_us": "a whole decision among 64 replicas",
    "decide1024_p50_us": "the same among 1,024",
    "ids_to_decision_16k_p50_us": "16,000 token ids to keys to a decision",
    "visible_p50_ms": "from sealing in another process to the mirror here",
    "visible_p99_ms": "the slowest of a hundred",
    "redis_ops_per_request": "commands, those inside scripts included",
    "redis_bytes_per_request": "in and out of Redis",
    "blind_ms": "a new mirror reads the snapshot of a pool",
}


def figure_rows(told: dict[str, Any]) -> list[list[str]]:
    """Rows under FIGURES; figures that were left out have none."""
    return [[name, _number(told[name]), what] for name, what in _MEANINGS.items() if name in told]


def setting(told: dict[str, Any]) -> str:
    """What was run, and on what."""
    machine = told["machine"]
    return (
        f"{told['entries']:,} keys of prompts, held {told['pairs']:,} times; {told['table_keys']:,} keys and "
        f"{told['table_bytes'] / 1e6:.0f} MB in all, the last-level cache has {told['cache_bytes'] / 1e6:.0f} MB; "
        f"{told['rounds']} rounds; {machine['cpus']} CPUs, {machine['cpu_model']}"
    )


def doubt(told: dict[str, Any]) -> str:
    """What makes the figures doubtful, in a sentence; empty when nothing does."""
    if told["load_before"] > BUSY:
        return was_busy(told["load_before"])
    if told["table_bytes"] <= told["cache_bytes"]:
        return "The mirror's table fits into the last-level cache, so look-ups are faster than in a large cluster."
    return ""


def _number(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
