"""`kvatlas bench router`: how fast the router looks up, follows, decides, and hears of what was sealed elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from cluster.bench.router_plan import LEAST_ENTRIES, MOST_ENTRIES, Plan
from cluster.cli.output import complain, print_json, print_table


def router(
    entries: Annotated[
        int, typer.Option(min=LEAST_ENTRIES, max=MOST_ENTRIES, help="Keys of the prompts that pools hold.")
    ] = Plan.entries,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="How often each phase is measured; the median counts.")
    ] = Plan.rounds,
    beyond_cache: Annotated[
        bool, typer.Option(help="Add keys until the mirror's table is larger than the processor's cache.")
    ] = Plan.beyond_cache,
    redis: Annotated[
        bool, typer.Option(help="Also measure the way through a Redis, which is started for it.")
    ] = Plan.redis,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Measure the router: no model, no server. Takes half a minute, and about 1 GB of memory.

    64 pools hold prompts of 1,000 blocks to many different depths; each prompt is looked up once.
    """
    from cluster.bench import report, router_report
    from cluster.bench.router_run import measure

    plan = dataclasses.replace(Plan(), entries=entries, rounds=rounds, beyond_cache=beyond_cache, redis=redis)
    told = measure(plan, _tell)
    told["machine"] = report.machine()
    doubt = router_report.doubt(told)
    if doubt:
        complain(f"kvatlas: {doubt}")
    if as_json:
        print_json(told)
        return
    print_table(router_report.FIGURES, router_report.figure_rows(told))
    print(f"\n{router_report.setting(told)}")


def _tell(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    typer.echo(text, err=True)
