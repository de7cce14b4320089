"""`kvatlas replay`: what the router would make of a trace, or of the decisions in a log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cluster.cli.output import complain, print_json, print_table
from cluster.cli.router_options import RouterSettings, policies, router_options
from cluster.errors import UsageError

if TYPE_CHECKING:
    from router.replay.service_times import ServiceTimes
    from router.replay.trace import Trace

CONTROLS: Final = ("none", "no-sharing")


OF_DECISIONS: Final = frozenset({"decisions", "policy", "seed", "settings", "as_json"})
"""Parameters that count with --decisions."""
OF_TOKENIZER: Final = ("block_tokens", "output_tokens", "seed")
"""Those that count with a TRACE only if there is --tokenizer."""
_OF_CALIBRATION: Final = "what replicas need comes from --calibration"
ELSEWHERE: Final = {
    "prefill_tokens_per_s": _OF_CALIBRATION,
    "decode_interference_s": _OF_CALIBRATION,
    "claim_tokens": "claims for cold prefixes are not simulated",
}


def replay(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRACE]",
            help="Requests as JSON lines, plain or .gz, in Mooncake's format; with --tokenizer a workload of bench serve.",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=1024, help="How many replicas.")] = 8,
    routers: Annotated[
        int, typer.Option(min=1, max=1024, help="How many routers; each request comes to one by chance.")
    ] = 1,
    pool_tokens: Annotated[
        int | None, typer.Option(min=1, help="Pool of each replica, in tokens. Default: it keeps everything.")
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME,NAME", help="Routing policies, or `all`.")] = "all",
    load: Annotated[
        str, typer.Option(metavar="SHARE,SHARE", help="Arrival rates as shares of what the replicas can take at most.")
    ] = "0.5,1.0,1.2",
    lag_ms: Annotated[
        float, typer.Option(min=0, max=3.6e6, help="How old is what a router knows of pools and of other routers.")
    ] = 50.0,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each policy and load; medians count.")] = 3,
    control: Annotated[
        str, typer.Option(metavar="|".join(CONTROLS), help="no-sharing: every block of the trace is made unique.")
    ] = "none",
    requests: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="Only the first so many. Default: all.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Service times of a replica. Default: an H100-class 8B model, on paper."),
    ] = None,
    rate_error: Annotated[
        float,
        typer.Option(
            min=0.001, max=1000, help="Replicas are believed to be so many times faster, or slower, at first."
        ),
    ] = 2.0,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model directory: TRACE is a workload file of prompts.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Block size, with --tokenizer.")] = 16,
    output_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Length of each answer, with --tokenizer.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Order of the prompts, with --tokenizer; chance, with --decisions.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, max=1024, help="Processes. Default: one for each CPU.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw an SVG.")] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Decide again what a decision log holds, in place of TRACE.")
    ] = None,
    settings: RouterSettings = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Simulate replicas under the router of the product, on a trace of requests. A run of 12,000 requests takes about 20 s of
    one CPU.

    With --decisions: what would another policy have decided of the requests that a router logged? It goes with --policy, --set,
    --seed and --json.
    """
    if (trace is None) == (decisions is None):
        raise UsageError("`kvatlas replay` takes either a TRACE or --decisions LOG: give one of them.")
    if decisions is not None:
        _refuse(context, [name for name in context.params if name not in OF_DECISIONS], "with --decisions")
        from cluster.cli import replay_decisions  # which brings numba

        replay_decisions.run(decisions, policy, as_json, settings or (), seed)
        return
    assert trace is not None
    if control not in CONTROLS:
        raise UsageError(f"--control {control} is unknown: choose from {', '.join(CONTROLS)}.")
    if tokenizer is None:
        _refuse(context, OF_TOKENIZER, "without --tokenizer")

    from router.replay import report, sweep
    from router.replay.errors import ReplayError

    chosen = policies(policy)
    options = router_options(settings or (), elsewhere=ELSEWHERE)
    try:
        wanted = sweep.Sweep(
            policies=chosen,
            replicas=replicas,
            routers=routers,
            pool_tokens=pool_tokens,
            loads=_loads(load),
            lag_s=lag_ms / 1e3,
            seeds=seeds,
            rate_error=rate_error,
            control="no-sharing" if control == "no-sharing" else "none",
            options=options,
        )
        if tokenizer is None:
            played = _read(trace, requests)
        else:
            from cluster.bench.replay_prompts import trace_of

            played = trace_of(trace, tokenizer, requests or 100, seed, block_tokens, output_tokens)
        runs = sweep.run(wanted, played, _times(calibration), jobs or len(os.sched_getaffinity(0)), _tell)
    except ReplayError as error:
        raise UsageError(f"{error}.") from error
    for text in _warnings(runs):
        complain(f"kvatlas: {text}")
    if plot is not None:
        _draw(plot, runs)
    if as_json:
        print_json({"runs": runs})
        return
    print_table(report.HEAD, report.rows(runs))
    print(f"\n{report.setting(runs[0])}\n\n{report.LEGEND}")


def _refuse(context: typer.Context, names: Sequence[str], where: str) -> None:
    """Raises `UsageError` for the first of these parameters that was given: it would have no effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]} has no effect {where}: leave it out.")


def _warnings(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What makes figures say less than they seem to, a sentence for each run."""
    found = []
    for run in runs:
        name = f"{run['policy']} at load {run['load']:g}"
        if run["fallbacks"]:
            found.append(f"{name}: {run['fallbacks']} decisions were fallbacks, which say nothing about the policy.")
        if run["rejects"] == run["requests"]:
            found.append(
                f"{name}: no request fits into a pool of {run['pool_tokens']:,} tokens; give more --pool-tokens."
            )
    return found


def _read(file: Path, requests: int | None) -> Trace:
    from router.replay import trace

    played = trace.read(file)
    return played if requests is None else played.head(requests)


def _times(file: Path | None) -> ServiceTimes:
    from router.replay import service_times

    return service_times.H100_8B if file is None else service_times.read(file)


def _loads(text: str) -> list[float]:
    """The numbers in a comma-separated list. Raises `UsageError`."""
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load < 1000 for load in loads):
        raise UsageError(f"--load {text} is no list of shares above 0: write for example 0.5,1.0,1.2.")
    return loads


def _draw(file: Path, runs: Sequence[dict[str, Any]]) -> None:
    from router.replay import plot

    try:
        file.write_text(plot.drawn(runs), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {file} ({error.strerror}): give --plot another path.") from error


def _tell(run: dict[str, Any]) -> None:
    """Progress goes to stderr: stdout is the report."""
    late = "-" if run["ttft_p95_s"] is None else f"{run['ttft_p95_s']:.3f} s"
    typer.echo(f"load {run['load']:g} {run['policy']}: hit {run['hit']:.3f}, P95 TTFT {late}", err=True)
