"""`kvatlas directory check`: do pools, directory and the mirror of every router tell of the same blocks?

They are read one after the other while requests go on, so a difference may be a change that is on its way. The check is
repeated until there is none, or time is up: what is left then is a fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cluster import http_client
from cluster.cli.output import print_json, print_table, say
from cluster.cli.target import KEY_VARIABLE, Target, find
from cluster.errors import ServeFailed, UsageError

PAUSE_S = 0.2
ANSWER_S = 40.0
"""Longer than the server takes at most to compare."""

DIRECTORY = "directory"
"""What the server calls the place that is no mirror."""

DIFFERENCES = ("missing", "phantom")

directory = typer.Typer(name="directory", help="Look into a running server's directory.", no_args_is_help=True)


@directory.callback()
def _directory() -> None:
    """Look into a running server's directory."""


@directory.command()
def check(
    url: Annotated[str | None, typer.Option(help="Server to ask. Default: the one running here.")] = None,
    port: Annotated[int | None, typer.Option(help="Which of several servers on this machine.")] = None,
    within: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long changes may be on their way.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Compare every pool with the directory and every mirror. Exit code 0: no difference, 1: some, or not to tell."""
    try:
        target = _target(url, port)
        found = settle(lambda: _ask(target), within, time.monotonic, time.sleep)
    except ServeFailed as error:
        found = Comparison([], str(error))
    if as_json:
        print_json({"pools": found.pools, "clean": found.is_clean, "problem": found.problem})
    elif found.problem:
        raise ServeFailed(found.problem)
    else:
        _show(found, within)
    raise typer.Exit(0 if found.is_clean else 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the server found: a record per pool (`PoolCheck`), or the problem that kept it from looking."""

    pools: list[dict[str, Any]]
    problem: str = ""

    @property
    def differing(self) -> int:
        """Keys missing or phantom, counted for each pool, for the directory and for each mirror."""
        return sum(place[name] for pool in self.pools for place in pool["places"] for name in DIFFERENCES)

    @property
    def is_clean(self) -> bool:
        """Whether everything was compared and nothing differs."""
        return not self.problem and not self.differing


def settle(
    ask: Callable[[], Comparison], within_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Comparison:
    """The first clean answer of `ask`, or the last one that it gave in `within_s`. Asks at least once."""
    deadline = clock() + within_s
    while True:
        found = ask()
        if found.is_clean or clock() + PAUSE_S > deadline:
            return found
        sleep(PAUSE_S)


def _target(url: str | None, port: int | None) -> Target:
    target = find(url, port)
    if target.is_starting:
        raise ServeFailed(f"{target.url} is still starting: `kvatlas status` says when it is ready.")
    if not target.admin_key:
        raise UsageError(f"The directory is shown to operators only: set {KEY_VARIABLE} to the server's admin key.")
    return target


def _ask(target: Target) -> Comparison:
    """One comparison. Raises `UsageError` for a wrong key, `ServeFailed` where asking again would not help."""
    answer = http_client.get(f"{target.url}/debug/directory", ANSWER_S, target.admin_key)
    if answer.status == 200:
        pools: list[dict[str, Any]] = answer.body.get("pools", [])
        return Comparison(
            pools, "" if pools else "No pool was compared: `kvatlas status` says whether a replica is up."
        )
    if answer.status == 503:
        return Comparison([], answer.error)
    if answer.status in (401, 404):
        raise UsageError(
            f"{target.url} does not take this admin key ({answer.error}): set {KEY_VARIABLE} to the key that it was started with."
        )
    raise ServeFailed(answer.error)


def _show(found: Comparison, within_s: float) -> None:
    rows = [(pool, place) for pool in found.pools for place in pool["places"]]
    print_table(["POOL", "REPLICAS", "BLOCKS", "PLACE", "MISSING", "PHANTOM"], [_row(*row) for row in rows])
    if found.is_clean:
        say("No difference.")
        return
    for pool, place in rows:
        if place["examples"]:
            say(f"pool {_name(pool)}, {_place(place)}: for example {' '.join(place['examples'])}")
    say(
        f"Differences remain after {within_s:g} s: what is missing is computed again, what is phantom misleads the router."
    )


def _row(pool: dict[str, Any], place: dict[str, Any]) -> list[object]:
    blocks, counts = f"{pool['pool_blocks']:,}", [f"{place[name]:,}" for name in DIFFERENCES]
    return [pool["pool"] or "-", ",".join(pool["replica_ids"]), blocks, _place(place), *counts]


def _place(place: dict[str, Any]) -> str:
    return str(place["place"]) if place["place"] == DIRECTORY else f"mirror of {place['place']}"


def _name(pool: dict[str, Any]) -> str:
    """What to call a pool that may not be in the directory."""
    return pool["pool"] or f"of {', '.join(pool['replica_ids'])}, which no pool in the directory names"
