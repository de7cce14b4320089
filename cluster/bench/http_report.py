"""The HTTP benchmark's report as a table and sentences for a person."""

from __future__ import annotations

from typing import Any, Final

from cluster.bench.report import BUSY, was_busy

FIGURES: Final = ["MEASURE", "KVATLAS", "ECHO", "WHAT"]

_MEASURES: Final = {
    "cpu_ms_per_request": "processor milliseconds a request, of all processes that serve it",
    "ttft_ms_p50": "milliseconds to the first token, all clients asking",
    "whole_ms_p50": "milliseconds to the end of the answer",
    "events_per_request": "events an answer comes in",
}
_ADDED: Final = {
    "cpu_ratio": "times the echo's processor time",
    "ttft_added_ms_p50": "milliseconds that the first token comes later, on an idle server",
    "ttft_added_loaded_ms_p50": "the same while all clients ask",
}


def figure_rows(told: dict[str, Any]) -> list[list[str]]:
    """Rows under FIGURES: both sides, then what is between them, then the processor time by part."""
    rows = [[name, f"{told[name]:.2f}", f"{told[f'echo_{name}']:.2f}", what] for name, what in _MEASURES.items()]
    rows += [[name, f"{told[name]:.2f}", "", what] for name, what in _ADDED.items()]
    echo = told["echo_cpu_ms_by_part"]
    for part, used in told["cpu_ms_by_part"].items():
        rows.append([f"  {part}", f"{used:.2f}", f"{echo[part]:.2f}" if part in echo else "", "of the processor time"])
    return rows


def setting(told: dict[str, Any]) -> str:
    """What was run, and on what."""
    machine = told["machine"]
    return (
        f"{told['tokens']} tokens {1e3 * told['cadence_s']:g} ms apart, {told['concurrency']} clients, {told['replicas']} "
        f"replicas, {told['rounds']} rounds of {told['requests']} requests; {machine['cpus']} CPUs, {machine['cpu_model']}"
    )


def doubt(told: dict[str, Any]) -> str:
    """What makes the figures doubtful, in a sentence; empty when nothing does."""
    if told["load_before"] > BUSY:
        return was_busy(told["load_before"])
    return ""
