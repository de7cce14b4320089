"""`kvatlas bench http`: what serving costs in processor time and waiting, beside a bare echo on Ray Serve."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from cluster.bench.http_plan import Plan
from cluster.cli.output import complain, print_json, print_table


def http(
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="How often each side is measured; the median counts.")
    ] = Plan.rounds,
    requests: Annotated[int, typer.Option(min=1, help="Requests to each side in a round.")] = Plan.requests,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="How many at a time.")] = Plan.concurrency,
    tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer.")] = Plan.tokens,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Measure the way of a stream through the server, without a model. Takes about two minutes.

    Starts a cluster of its own. Scripted replicas send tokens 10 ms apart behind the ingress and the router of kvatlas; a
    bare Ray Serve application does the same beside them.
    """
    from cluster.bench import http_report, report
    from cluster.bench.http_run import measure

    plan = dataclasses.replace(Plan(), rounds=rounds, requests=requests, concurrency=concurrency, tokens=tokens)
    told = {**measure(plan, _tell), **dataclasses.asdict(plan), "machine": report.machine()}
    doubt = http_report.doubt(told)
    if doubt:
        complain(f"kvatlas: {doubt}")
    if as_json:
        print_json(told)
        return
    print_table(http_report.FIGURES, http_report.figure_rows(told))
    print(f"\n{http_report.setting(told)}")


def _tell(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    typer.echo(text, err=True)
