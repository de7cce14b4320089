"""`kvatlas bench serve`: load a running server and report."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from cluster import server_state
from cluster.cli.output import print_json, print_table
from cluster.cli.servers import pick
from cluster.errors import ServeFailed

bench = typer.Typer(name="bench", help="Measure a running server.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure a running server."""


@bench.command()
def serve(
    url: Annotated[str | None, typer.Option(help="Server to load. Default: the one running here.")] = None,
    workload: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON or JSON.gz with prefixes and examples. Default: synthetic."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 8,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 16,
    seed: Annotated[int, typer.Option(help="Order of the prompts.")] = 0,
    model: Annotated[str, typer.Option(help="Model name. Default: the first that the server lists.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Replay prompts that share prefixes against /v1/completions. Exit code 1 when a request failed."""
    import httpx

    from cluster.bench.replay import Load, replay
    from cluster.bench.summary import summarise
    from cluster.bench.workload import prompts

    todo = prompts(workload, requests, seed)
    if url is None:
        url = pick(server_state.running(server_state.runtime_dir(os.environ)), None).url
    load = Load(url.rstrip("/"), model, concurrency, output_tokens)
    try:
        report = summarise(*asyncio.run(replay(load, todo)))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServeFailed(
            f"Cannot measure {url} ({error}): is the server running? `kvatlas status --url {url}`."
        ) from error
    if as_json:
        print_json(report)
    else:
        print_table(["MEASURE", "VALUE"], list(report.items()))
    raise typer.Exit(1 if report["errors"] else 0)
