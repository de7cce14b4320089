"""`kvatlas status`: is it ready, what do its replicas hold, and where do requests go."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from cluster import http_client
from cluster.cli.output import print_json, print_table, say
from cluster.cli.target import KEY_VARIABLE, find
from cluster.errors import ServeFailed


def status(
    url: Annotated[str | None, typer.Option(help="Server to ask. Default: the one running here.")] = None,
    port: Annotated[int | None, typer.Option(help="Which of several servers on this machine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Show a running server, its replicas and its routing. Exit code 0: ready, 1: not ready."""
    target = find(url, port)
    state = target.state
    if state is not None and target.is_starting:
        report = _report(target.url, f"starting for {time.time() - state.started:.0f} s (process {state.pid})")
    else:
        try:
            report = _ask(target.url, target.admin_key)
        except ServeFailed as error:
            if not as_json:
                raise
            report = _report(target.url, str(error))
    if state is not None:
        report |= {"model": state.model, "pid": state.pid, "metrics_url": state.metrics_url, "started": state.started}
    if as_json:
        print_json(report)
    else:
        _show(report, bool(target.admin_key))
    raise typer.Exit(0 if report["ready"] else 1)


def _report(url: str, problem: str, detail: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is printed; `detail` is the body of /debug/state where it could be read."""
    detail = detail or {}
    replicas, routing = detail.get("replicas", []), detail.get("routing", {})
    return {"url": url, "ready": not problem, "problem": problem, "replicas": replicas, "routing": routing}


def _ask(url: str, key: str) -> dict[str, Any]:
    ready = http_client.get(f"{url}/health/ready", 10.0)
    detail = http_client.get(f"{url}/debug/state", 10.0, key) if key else None
    known = detail.body if detail and detail.status == 200 else None
    report = _report(url, "" if ready.status == 200 else ready.error, known)
    return report | {"key_refused": detail is not None and detail.status == 401}


def _show(report: dict[str, Any], has_key: bool) -> None:
    replicas, routing = report["replicas"], report["routing"]
    names = ", ".join(dict.fromkeys(f"{replica['model']} ({replica['mode']})" for replica in replicas))
    say(f"{report['url']}  {'ready' if report['ready'] else report['problem']}  {names}".rstrip())
    if not replicas:
        if report.get("key_refused"):
            say("The server does not accept this admin key.")
        elif not has_key:
            say(f"Set {KEY_VARIABLE} to the server's admin key to see its replicas.")
        return
    if report.get("metrics_url"):
        say(f"metrics at {report['metrics_url']}")
    lines = [("cluster", _cluster(replicas))]
    if routing:
        lines += [("routing", _decisions(routing)), ("tokens", _tokens(routing))]
        lines += [("directory", _directory(routing.get("directory", {})))]
        if routing.get("decision_log"):
            lines += [("log", _log(routing["decision_log"]))]
    for name, text in lines:
        say(f"{name:<10} {text}")
    head = ["REPLICA", "BLOCKS", "HELD", "RUNNING", "WAITING", "HIT TOKENS", "PUBLISHED", "POOL", "INTEGRITY"]
    print_table(head, [_row(replica, routing) for replica in replicas])


def _cluster(replicas: list[dict[str, Any]]) -> str:
    blocks = sum(replica["capacity_blocks"] for replica in replicas)
    asked = sum(replica["prefix_queried_tokens"] for replica in replicas)
    hit = sum(replica["prefix_hit_tokens"] for replica in replicas)
    rate = f"hit rate {hit / asked:.0%} ({hit:,} of {asked:,} tokens)" if asked else "no token asked for yet"
    return f"{_count(len(replicas), 'replica')}, {_count(blocks, 'block')}, {rate}"


def _decisions(routing: dict[str, Any]) -> str:
    """How often which outcome, in the order that the router reports them."""
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in routing.get("decisions", {}).items())
    return f"{routing.get('policy', 'unknown policy')}: {outcomes or 'no decisions'}; {_retries(routing)}"


def _retries(routing: dict[str, Any]) -> str:
    retries = routing.get("retries", 0)
    return f"{retries:,} {'retry' if retries == 1 else 'retries'}"


def _tokens(routing: dict[str, Any]) -> str:
    queried, predicted, measured, phantom = (
        routing.get(f"{name}_tokens", 0) for name in ("queried", "predicted", "measured", "phantom")
    )
    return f"of {queried:,} queried: {predicted:,} predicted to be cached, {measured:,} were; {phantom:,} phantom"


def _directory(directory: dict[str, Any]) -> str:
    state = directory.get("state", "unknown")
    if state == "off":
        return "off: requests are routed by load only"
    lag_s = directory.get("lag_s")
    lag = "lag unknown" if lag_s is None else f"lag {lag_s:.3f} s"
    behind = _count(directory.get("lag_entries", 0), "entry", "entries")
    faults = [
        _count(directory.get("resyncs", 0), "resync"),
        _count(directory.get("gaps", 0), "gap"),
        _count(directory.get("digest_mismatches", 0), "digest mismatch", "digest mismatches"),
    ]
    problem = f"; {directory['problem']}" if directory.get("problem") else ""
    return f"{state}, {lag} ({behind} behind), {', '.join(faults)}{problem}"


def _log(log: dict[str, Any]) -> str:
    """Where decisions are logged, and what became of them; what is wrong comes first, because a log fails in silence."""
    counts = ", ".join(f"{log.get(name, 0):,} {name}" for name in ("written", "dropped", "failed"))
    problem = f"cannot be written ({log['problem']}): check router.decision_log; " if log.get("problem") else ""
    return f"{log.get('path', '')}: {problem}{counts}"


def _row(replica: dict[str, Any], routing: dict[str, Any]) -> list[object]:
    return [
        replica["replica_id"],
        f"{replica['capacity_blocks']:,} x {replica['block_tokens']}",
        replica["held_blocks"],
        replica["running"],
        replica["waiting"],
        _share(replica["prefix_hit_tokens"], replica["prefix_queried_tokens"]),
        _published(replica.get("publisher", {})),
        _pool_state(replica["replica_id"], replica.get("publisher", {}), routing.get("directory", {})),
        replica["integrity"] or "ok",
    ]


def _published(publisher: dict[str, Any]) -> str:
    """Blocks in the directory, and the publisher's state where that is not the usual one; "-" without a directory.

    Of the replicas that share a pool one publishes it; the others stand by.
    """
    if not publisher:
        return "-"
    state = publisher.get("state", "unknown")
    if state == "standby":
        return "standby"
    return f"{publisher.get('published_blocks', 0):,}" + ("" if state == "open" else f" ({state})")


def _pool_state(replica_id: str, publisher: dict[str, Any], directory: dict[str, Any]) -> str:
    """How the router sees the pool of this replica; "-" where there is no directory that could list it."""
    for pool in directory.get("pools", []):
        if replica_id in pool["replica_ids"]:
            return str(pool["state"]) if pool["whole"] else f"{pool['state']}, no keys"
    return "not listed" if publisher and directory.get("state", "off") != "off" else "-"


def _share(hit: int, asked: int) -> str:
    return f"{hit:,} of {asked:,} ({hit / asked:.0%})" if asked else "none asked"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
