"""`kvatlas pool`: the regions of this machine, those of running replicas and those that dead ones left.

It asks no server: a region is a file, and looking at it disturbs nobody (`kvpool/region_view.py`). NAME is the file's
name, with or without the prefix `kvatlas-`.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.output import print_json, print_table, say
from cluster.cli.pool_tables import (
    BLOCK_HEAD,
    REGION_HEAD,
    SLOT_HEAD,
    block_row,
    region_lines,
    region_row,
    size,
    slot_row,
)
from cluster.errors import UsageError

if TYPE_CHECKING:
    from kvpool.region_view import RegionFile, RegionView

pool = typer.Typer(name="pool", help="Look into the pools of this machine.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="See `kvatlas pool ls`; the prefix kvatlas- may be left out.")
]
Directory = Annotated[Path, typer.Option(metavar="DIR", help="Where the regions are.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]
_SHM = Path("/dev/shm")


@pool.callback()
def _pool() -> None:
    """Look into the pools of this machine."""


@pool.command()
def ls(directory: Directory = _SHM, as_json: AsJson = False) -> None:
    """List the regions: whose they are, how full, and whether somebody lives there."""
    from kvpool import REGION_PREFIX
    from kvpool.region_view import regions_in

    try:
        files = regions_in(directory, REGION_PREFIX)
    except OSError as error:
        raise UsageError(f"{directory} cannot be read ({error.strerror}): name another with --directory.") from None
    found = [_summary(file) for file in files]
    if as_json:
        print_json({"directory": str(directory), "regions": found})
    elif found:
        print_table(REGION_HEAD, [region_row(told) for told in found])
    else:
        say(f"No region in {directory}.")


@pool.command()
def show(name: Name, directory: Directory = _SHM, as_json: AsJson = False) -> None:
    """Show one region: its geometry, its processes, its blocks, its totals, and whether it is whole."""
    from kvpool.dump import check_region, describe_region

    with _open(name, directory) as view:
        report, violation = describe_region(view), check_region(view)
    if as_json:
        print_json(asdict(report) | {"integrity": violation})
    else:
        for line in region_lines(report, violation):
            say(line)
        if report.slots:
            print_table(SLOT_HEAD, [slot_row(slot) for slot in report.slots])
        else:
            say("No process has a slot.")


@pool.command()
def check(name: Name, directory: Directory = _SHM, as_json: AsJson = False) -> None:
    """Check that a region is what it claims to be. Exit code 0: it is, 1: a violation.

    While processes live there, a violation is one that stays.
    """
    from kvpool.dump import check_region

    with _open(name, directory) as view:
        live, violation = view.is_live(), check_region(view)
    if as_json:
        print_json({"path": str(view.path), "live": live, "integrity": violation})
    elif not violation:
        say("No violation.")
    else:
        say(f"{violation}.")
        if not live:
            say("Its processes are dead: a replica that takes it over puts right what they left half done.")
    raise typer.Exit(1 if violation else 0)


@pool.command()
def dump(
    name: Name,
    block: Annotated[int | None, typer.Option(min=0, help="Only this block, with its history.")] = None,
    request: Annotated[str, typer.Option(metavar="TEXT", help="Only blocks of requests whose id contains this.")] = "",
    slot: Annotated[
        int | None, typer.Option(min=0, help="Only blocks that the process in this slot has or holds.")
    ] = None,
    state: Annotated[str, typer.Option(metavar="STATE", help="Only blocks in this state, e.g. INDEXED.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most blocks to print; 0: all.")] = 50,
    directory: Directory = _SHM,
    as_json: AsJson = False,
) -> None:
    """Show blocks: state, owner, holders, request, key, place in the index, ages; in guard mode marks and history."""
    from kvpool.dump import BlockFilter, dump_blocks

    with _open(name, directory) as view:
        try:
            count, found = dump_blocks(view, BlockFilter(block, request, slot, state), limit or None)
        except ValueError as error:
            raise UsageError(f"{error}.") from None
    if as_json:
        print_json({"path": str(view.path), "matching_blocks": count, "blocks": [asdict(each) for each in found]})
        return
    if not found:
        say("No block fits.")
        return
    print_table(BLOCK_HEAD, [block_row(each) for each in found])
    if block is not None:
        for each in found:
            say(f"key      {each.key or '-'}")
            say(f"history  {'; '.join(each.history) or 'none noted (it is kept in guard mode)'}")
    if len(found) < count:
        say(f"{count - len(found):,} more: raise --limit, or ask for less.")


@pool.command()
def rm(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Even while processes use it, which keep its memory.")] = False,
    directory: Directory = _SHM,
    as_json: AsJson = False,
) -> None:
    """Remove a region that nobody has open, with all that is cached there."""
    from kvpool.region_file import remove_unused

    file = _find(name, directory)
    if file.kind == "unreadable":
        raise UsageError(f"{file.problem}.")
    removed = remove_unused(file.path)
    if not removed and not force:
        raise UsageError(_refusal(file))
    if not removed:
        try:
            file.path.unlink()
        except OSError as error:
            raise UsageError(f"{file.path} cannot be removed: {error.strerror}.") from None
    if as_json:
        print_json({"path": str(file.path), "removed": True, "freed": removed, "file_bytes": file.file_bytes})
    elif removed:
        say(f"Removed {file.path} ({size(file.file_bytes)}).")
    else:
        say(f"Removed the name {file.path}; its {size(file.file_bytes)} are free when its processes end.")


def _find(name: str, directory: Path) -> RegionFile:
    """The region that is meant. Raises `UsageError` when there is none."""
    from kvpool import REGION_PREFIX
    from kvpool.region_view import describe_file

    if not name or "/" in name:
        raise UsageError(f"{name!r} is not the name of a region: give the file's name, and its place with --directory.")
    for candidate in (name, REGION_PREFIX + name):
        file = describe_file(directory / candidate)
        if file is not None:
            return file
    raise UsageError(f"There is no region {name} in {directory}: `kvatlas pool ls` shows those that there are.")


def _open(name: str, directory: Path) -> RegionView:
    """The region that is meant, for a look. Raises `UsageError` when it cannot be looked at."""
    from kvpool.region_view import RegionView

    file = _find(name, directory)
    if file.kind != "region":
        raise UsageError(f"{file.problem}.")
    try:
        return RegionView(file.path)
    except FileNotFoundError:
        raise UsageError(f"{file.path} has just been removed.") from None


def _summary(file: RegionFile) -> dict[str, Any]:
    """What `ls` tells of one file; of those that cannot be looked at only name, size and why."""
    from kvpool.dump import describe_region
    from kvpool.errors import RegionMismatch
    from kvpool.region_view import RegionView

    told: dict[str, Any] = {"name": file.path.name, "path": str(file.path), "file_bytes": file.file_bytes}
    told |= {"kind": file.kind, "problem": file.problem}
    if file.kind != "region":
        return told
    try:
        with RegionView(file.path) as view:
            report = describe_region(view)
    except (OSError, RegionMismatch) as error:
        return told | {"kind": "gone", "problem": str(error)}
    return told | {
        "fingerprint": report.fingerprint,
        "owner": report.owner,
        "live": report.live,
        "unused_s": report.unused_s,
        "capacity_blocks": report.capacity_blocks,
        "block_tokens": report.geometry.block_tokens,
        "used_blocks": report.used_blocks,
        "cached_blocks": report.blocks["cached"],
        "free_blocks": report.free_blocks,
        "pids": [slot.pid for slot in report.slots if slot.alive],
    }


def _refusal(file: RegionFile) -> str:
    """Why a region is not removed: who has it open."""
    pids = _users(file.path)
    if not pids:
        return f"{file.path} is in use, or not yours to remove: stop its server with `kvatlas stop`, or give --force."
    who = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
    return f"{file.path} is open in {who}: stop the server with `kvatlas stop`, or give --force."


def _users(path: Path) -> list[int]:
    """The processes that have the file at `path` open, as far as /proc shows them to us; never this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _has_open(entry / "fd", path):
            found.append(int(entry.name))
    return sorted(found)


def _has_open(descriptors: Path, path: Path) -> bool:
    try:
        wanted = os.stat(path)
        return any(_is_same(each, wanted) for each in descriptors.iterdir())
    except OSError:  # it ended, or is another user's
        return False


def _is_same(descriptor: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(descriptor), wanted)
    except OSError:
        return False
