"""The engine benchmark's report as tables and sentences for a person."""

from __future__ import annotations

from typing import Any, Final

GRID: Final = ["CONTEXT", "BATCH", "ENGINES", "TOKENS/S", "CEILING", "FRACTION"]
OVER_HTTP: Final = ["HTTP TOKENS/S", "FRACTION", "OVER ENGINE"]
FIGURES: Final = ["MEASURE", "VALUE", "WHAT"]
_DISTURBED: Final = 0.5
"""As long as less is disturbed, most points have quiet rounds to tell of."""

_MEANINGS: Final = {
    "bandwidth_gb_s": "large reads, all threads",
    "gemm_gflops": "the model's linear layers on 512 rows, all threads",
    "prefill_tok_s": "a prompt that is not cached, to its first token",
    "prefill_fraction": "its linear layers by that whole time, over gemm_gflops",
    "cold_ttft_ms": "milliseconds to its first token",
    "cached_ttft_ms": "the same prompt again",
    "peak_rss_mb": "memory of the process, the touched part of the pool included",
}
_OVER_HTTP: Final = {
    "cold_ttft_ms": "to the first token through HTTP",
    "cached_ttft_ms": "the same prompt again",
}


def grid(told: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the grid, with what came through HTTP beside it where that was measured."""
    through = {_point(one): one for one in told["http"]["grid"]} if "http" in told else {}
    rows = []
    for one in told["grid"]:
        row = [str(one["ctx"]), str(one["batch"]), str(one["engines"])]
        row += [_number(one["tok_s"]), _number(one["ceiling_tok_s"]), f"{one['fraction']:.2f}"]
        if other := through.get(_point(one)):
            row += [_number(other["tok_s"]), f"{other['fraction']:.2f}", f"{other['over_engine']:.2f}"]
        rows.append(row)
    return [*GRID, *(OVER_HTTP if through else [])], rows


def figure_rows(told: dict[str, Any]) -> list[list[str]]:
    """Rows under FIGURES."""
    rows = [[name, _number(told[name]), what] for name, what in _MEANINGS.items()]
    if "http" in told:
        rows += [[f"http {name}", _number(told["http"][name]), what] for name, what in _OVER_HTTP.items()]
    return rows


def startup(told: dict[str, Any]) -> str:
    """Where the starts spent their time, a sentence for each."""
    split = dict(told["startup"])
    lines = [f"Process to first token {split.pop('total_s'):.1f} s: {_phases(split)}."]
    for one in told["http"]["startup"] if "http" in told else []:
        replicas = f"{one['replicas']} replica{'s' * (one['replicas'] > 1)}"
        lines.append(
            f"Server with {replicas} ready after {one['ready_s']:.1f} s; in a replica {_phases(one['load_s'])}."
        )
    return "\n".join(lines)


def setting(told: dict[str, Any]) -> str:
    """What was run, and on what."""
    machine, mode = told["machine"], told["mode"]
    return (
        f"{told['model']}, {mode} mode{', deterministic' if told['deterministic'] else ''}, {told['threads']} threads in all; "
        f"median of {told['rounds']} rounds of {told['steps']} steps; prompt of {told['prompt_tokens']} tokens; "
        f"{machine['cpus']} CPUs, {machine['cpu_model']}"
    )


def doubt(told: dict[str, Any]) -> str:
    """What makes the figures doubtful, in a sentence; empty when nothing does."""
    if told["disturbed_share"] > _DISTURBED:
        return (
            f"Others used the processors during {told['disturbed_share']:.0%} of the measurements, so figures may be worse than "
            "they could be: measure again when the machine is idle, or with more --rounds."
        )
    if told["machine"]["cpus"] < told["threads"]:
        return (
            f"The engines have {told['threads']} threads and {told['machine']['cpus']} CPUs, so they wait for each other: "
            "measure with --threads of as many as there are."
        )
    return ""


def _point(one: dict[str, Any]) -> tuple[int, int, int]:
    return one["ctx"], one["batch"], one["engines"]


def _phases(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {value:.2f} s" for name, value in seconds.items())


def _number(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
