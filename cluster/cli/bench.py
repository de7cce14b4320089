"""`kvatlas bench serve`: load a running server, or a fresh one for each routing policy, and report.

`kvatlas bench pool`, `router`, `http` and `engine` are in `cluster/cli/bench_pool.py`, `bench_router.py`, `bench_http.py` and
`bench_engine.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster import server_state
from cluster.cli.bench_engine import engine
from cluster.cli.bench_http import http
from cluster.cli.bench_pool import pool
from cluster.cli.bench_router import router
from cluster.cli.flags import load_config
from cluster.cli.output import complain, print_json, print_table
from cluster.cli.serve import Settings
from cluster.cli.target import find
from cluster.errors import UsageError

if TYPE_CHECKING:
    from cluster.bench.runs import Target, Work

# Before the server's own limit counts, a model may have to be downloaded or converted.
PREPARE_S = 600.0

bench = typer.Typer(
    name="bench", help="Measure a server, the pool, the router, the HTTP side, or the engine.", no_args_is_help=True
)
bench.command()(pool)
bench.command()(router)
bench.command()(http)
bench.command()(engine)


@bench.callback()
def _bench() -> None:
    """Measure a server, the pool, the router, the HTTP side, or the engine."""


@bench.command()
def serve(
    serve_model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Model of fresh servers, as in `kvatlas serve`.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Server to load. Default: the one running here.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="Load a fresh server for each of these routing policies.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas of a fresh server.")] = None,
    pool_tokens: Annotated[int | None, typer.Option(help="Pool of each replica of a fresh server, in tokens.")] = None,
    settings: Settings = None,
    workload: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON or JSON.gz with prefixes and examples. Default: synthetic."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 8,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 16,
    seed: Annotated[int, typer.Option(help="Order of the prompts.")] = 0,
    model: Annotated[str, typer.Option(help="Model name at a running server. Default: the first that it lists.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Replay prompts that share prefixes against /v1/completions. Exit code 1 when a request failed.

    With MODEL, --policy, --replicas, --pool-tokens or --set, each policy gets a fresh server with cold pools, which is stopped
    afterwards. Without them the running server is loaded.
    """
    given = {"MODEL": serve_model, "--policy": policy, "--replicas": replicas, "--pool-tokens": pool_tokens}
    fresh = [name for name, value in (given | {"--set": settings or None}).items() if value is not None]
    _refuse_conflicts(fresh, url, model)

    from cluster.bench.runs import Work, measure
    from cluster.bench.workload import prompts

    source = workload.name if workload is not None else "synthetic"
    work = Work(prompts(workload, requests, seed), source, concurrency, output_tokens, seed)
    if fresh:
        runs = list(_fresh(serve_model or "", policy, replicas, pool_tokens, settings or [], work))
    else:
        runs = [measure(_running(url, model), work)]
    _print(runs, as_json)
    raise typer.Exit(1 if any(run["errors"] for run in runs) else 0)


def _refuse_conflicts(fresh: Sequence[str], url: str | None, model: str) -> None:
    if not fresh:
        return
    if url is not None:
        raise UsageError(
            f"--url names a server that runs, and {fresh[0]} is for one that is started here: a running server keeps its "
            f"policy, replicas and pools, so give one or the other."
        )
    if model:
        raise UsageError(
            f"--model names a model at a running server, and {fresh[0]} starts one: give the model to serve as the "
            f"argument MODEL."
        )


def _running(url: str | None, model: str) -> Target:
    """The server at `url`, or the only one here. Its admin key is known when it is ours, or from the environment."""
    from cluster.bench.runs import Target

    found = find(url, None)
    ours = server_state.running(server_state.runtime_dir(os.environ))
    keys = {state.url: state.admin_key for state in ours}
    return Target(found.url, keys.get(found.url, found.admin_key), model)


def _fresh(
    model: str, policy: str | None, replicas: int | None, pool_tokens: int | None, settings: list[str], work: Work
) -> Iterator[dict[str, Any]]:
    """The runs over fresh servers. Everything that the options can have wrong is refused before the first starts."""
    from cluster.bench import server
    from cluster.bench.runs import measure_policies

    paths = [setting.partition("=")[0].strip() for setting in settings]
    taken = [path for path in paths if path in server.RESERVED or (path == "router.policy" and policy is not None)]
    if taken:
        raise UsageError(
            f"--set {taken[0]} is decided by `bench serve` itself (--policy sets the policy): leave it out."
        )
    named = {"cluster.replicas": ("--replicas", replicas), "pool.tokens": ("--pool-tokens", pool_tokens)}
    config = load_config(None, named, settings).config
    policies = [config.router.policy] if policy is None else _known(policy)

    def command(name: str) -> server.Command:
        return server.serve_command(model, name, replicas, pool_tokens, settings)

    limit_s = config.ray.start_timeout_s + PREPARE_S
    return measure_policies(policies, command, config.cluster.replicas, work, _tell, limit_s)


def _known(policy: str) -> list[str]:
    """The names in a comma-separated list. Raises `UsageError` for one that is no policy."""
    from router.policy import POLICIES

    names = [name.strip() for name in policy.split(",") if name.strip()]
    known = ", ".join(sorted(POLICIES))
    if not names:
        raise UsageError(f"--policy is empty: give one or more of {known}, separated by commas.")
    for name in names:
        if name not in POLICIES:
            raise UsageError(f"--policy {name} is no routing policy: choose from {known}.")
    return names


def _tell(text: str) -> None:
    """Progress goes to stderr: stdout is the report."""
    typer.echo(text, err=True)


def _print(runs: Sequence[dict[str, Any]], as_json: bool) -> None:
    from cluster.bench import report

    for run in runs:
        doubt = report.doubt(run)
        if doubt:
            complain(f"kvatlas: {doubt}")
    machine = report.machine()
    if as_json:
        print_json({"runs": list(runs), "machine": machine})
        return
    print_table(*report.table(runs))
    rows = report.replica_rows(runs)
    if rows:
        print()
        print_table(report.BY_REPLICA, rows)
    print(f"\n{machine['cpus']} CPUs, {machine['cpu_model']}")
