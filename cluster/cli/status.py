"""`kvatlas status`: is it ready, and what do its replicas hold."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from cluster import http_client, server_state
from cluster.cli.output import print_json, print_table, say
from cluster.cli.servers import pick
from cluster.errors import ServeFailed, UsageError


def status(
    url: Annotated[str | None, typer.Option(help="Server to ask. Default: the one running here.")] = None,
    port: Annotated[int | None, typer.Option(help="Which of several servers on this machine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Show a running server and its replicas. Exit code 0: ready, 1: not ready."""
    key = os.environ.get("KVATLAS_HTTP__ADMIN_KEY", "")
    state = None
    if url is None:
        state = pick(server_state.running(server_state.runtime_dir(os.environ)), port)
        url, key = state.url, state.admin_key
    elif port is not None:
        raise UsageError("--url and --port both name a server: give one of them.")
    url = url.rstrip("/")
    if state is not None and not state.metrics_url:  # which it learns when it is ready
        report = _report(url, f"starting for {time.time() - state.started:.0f} s (process {state.pid})")
    else:
        try:
            report = _ask(url, key)
        except ServeFailed as error:
            if not as_json:
                raise
            report = _report(url, str(error))
    if state is not None:
        report |= {"model": state.model, "pid": state.pid, "metrics_url": state.metrics_url, "started": state.started}
    if as_json:
        print_json(report)
    else:
        _show(report, bool(key))
    raise typer.Exit(0 if report["ready"] else 1)


def _report(url: str, problem: str, replicas: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"url": url, "ready": not problem, "problem": problem, "replicas": replicas or []}


def _ask(url: str, key: str) -> dict[str, Any]:
    ready = http_client.get(f"{url}/health/ready", 10.0)
    detail = http_client.get(f"{url}/debug/state", 10.0, key) if key else None
    replicas = detail.body.get("replicas") if detail and detail.status == 200 else None
    return _report(url, "" if ready.status == 200 else ready.error, replicas)


def _show(report: dict[str, Any], has_key: bool) -> None:
    say(f"{report['url']}  {'ready' if report['ready'] else report['problem']}")
    if not report["replicas"]:
        if not has_key:
            say("Set KVATLAS_HTTP__ADMIN_KEY to the server's admin key to see its replicas.")
        return
    if report.get("metrics_url"):
        say(f"metrics at {report['metrics_url']}")
    head = ["REPLICA", "MODEL", "MODE", "BLOCKS", "HELD", "RUNNING", "WAITING", "HIT TOKENS", "INTEGRITY"]
    print_table(head, [_row(replica) for replica in report["replicas"]])


def _row(replica: dict[str, Any]) -> list[object]:
    asked, hit = replica["prefix_queried_tokens"], replica["prefix_hit_tokens"]
    share = f"{hit:,} of {asked:,} ({hit / asked:.0%})" if asked else "none asked"
    return [
        replica["replica_id"],
        replica["model"],
        replica["mode"],
        f"{replica['capacity_blocks']:,} x {replica['block_tokens']}",
        replica["held_blocks"],
        replica["running"],
        replica["waiting"],
        share,
        replica["integrity"] or "ok",
    ]
