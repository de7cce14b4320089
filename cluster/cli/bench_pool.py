"""`kvatlas bench pool`: what the pool does in a second, with one process and with two, beside a lock and beside plain Python."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.bench.pool_plan import LEAST_BLOCKS, MOST_BLOCKS, Plan
from cluster.cli.output import complain, print_json, print_table


def pool(
    seconds: Annotated[float, typer.Option(min=0.001, max=3600, help="Length of each phase.")] = Plan.seconds,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each phase is measured; the median counts.")
    ] = Plan.rounds,
    capacity_blocks: Annotated[
        int, typer.Option(min=LEAST_BLOCKS, max=MOST_BLOCKS, help="Blocks of the region that the processes share.")
    ] = Plan.capacity_blocks,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Measure the pool: no model, no server, two processes on one region in /dev/shm. Takes a minute.

    A pair is a request for 16 blocks and their release.
    """
    from cluster.bench import pool_report, report
    from cluster.bench.pool_run import measure
    from kvpool import DEFAULT_DIRECTORY

    told = measure(Plan(seconds, rounds, capacity_blocks), DEFAULT_DIRECTORY, _tell)
    told["machine"] = report.machine()
    doubt = pool_report.doubt(told)
    if doubt:
        complain(f"kvatlas: {doubt}")
    if as_json:
        print_json(told)
        return
    print_table(pool_report.FIGURES, pool_report.figure_rows(told))
    print()
    print_table(pool_report.TIDY, pool_report.tidy_rows(told))
    print(f"\n{pool_report.startup(told)}")
    print(pool_report.setting(told))


def _tell(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    typer.echo(text, err=True)
