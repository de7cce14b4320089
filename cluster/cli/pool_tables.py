"""How `kvatlas pool` shows regions, processes and blocks to a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.dump import BlockReport, RegionReport, SlotReport

REGION_HEAD = ["NAME", "MODEL", "SIZE", "BLOCKS", "USED", "CACHED", "FREE", "PROCESSES", "STATE"]


def region_row(told: dict[str, Any]) -> list[object]:
    """A row of `ls`; of a file that cannot be looked at, why in a word."""
    if "live" not in told:
        return [told["name"], "-", size(told["file_bytes"]), *["-"] * 5, told["kind"]]
    state = "live" if told["live"] else f"orphan, unused for {duration(told['unused_s'])}"
    counts = [f"{told[name]:,}" for name in ("capacity_blocks", "used_blocks", "cached_blocks", "free_blocks")]
    return [told["name"], told["fingerprint"][:8], size(told["file_bytes"]), *counts, len(told["pids"]), state]


def region_lines(report: RegionReport, violation: str) -> list[str]:
    """What `show` says of a region, but for its processes."""
    totals, used = report.totals, report.used_blocks
    state = "live" if report.live else "orphan"
    lines = [
        ("model", f"{report.fingerprint[:16]}, owner {report.owner[:8]}, incarnation {report.incarnation}"),
        ("memory", f"{size(report.file_bytes)}, {size(report.control_bytes)} of them control part"),
        ("blocks", f"{report.capacity_blocks:,}: {report.geometry.describe()}"),
        ("now", ", ".join(f"{count:,} {name}" for name, count in report.blocks.items())),
        ("in use", f"{used:,} ({used / report.capacity_blocks:.0%}), at most {totals.used_peak:,} by one process"),
        ("prefixes", _share(totals.prefix_hit_tokens, totals.prefix_queried_tokens)),
        ("evicted", ", ".join(f"{count:,} {name}" for name, count in totals.evictions.items())),
        ("refused", ", ".join(f"{count:,} {name}" for name, count in totals.allocation_failures.items())),
        ("reclaimed", f"{totals.reclaimed_blocks:,} blocks of {totals.reclaimed_processes:,} dead processes"),
        ("integrity", violation or "ok"),
    ]
    head = f"{Path(report.path).name}  {state}, last used {duration(report.unused_s)} ago"
    return [head, *(f"{name:<10} {text}" for name, text in lines)]


SLOT_HEAD = [
    *("SLOT", "PID", "REPLICA", "STATE", "UP", "HELD", "FLOOR"),
    *("TICKET", "WANTED", "RUNNING", "WAITING", "QUEUED", "TOKENS/S"),
]


def slot_row(slot: SlotReport) -> list[object]:
    """A row of the processes in `show`."""
    return [
        slot.slot,
        slot.pid,
        slot.replica_id or "-",
        "alive" if slot.alive else "dead",
        "-" if slot.running_s is None else duration(slot.running_s),
        slot.used_blocks,
        slot.floor_blocks,
        slot.ticket or "-",
        slot.wanted_blocks or "-",
        slot.running,
        slot.waiting,
        slot.queued_prefill_tokens,
        f"{slot.prefill_tokens_per_s:,.0f}",
    ]


BLOCK_HEAD = [
    *("BLOCK", "STATE", "LIFE", "OWNER", "HOLDERS", "REQUEST", "KEY"),
    *("PARENT", "DEPTH", "CHILDREN", "USED", "BORN", "MARK"),
]


def block_row(block: BlockReport) -> list[object]:
    """A row of `dump`."""
    owner = "-"
    if block.slot is not None:
        owner = f"{block.slot}:{block.pid or 'gone'}{f' ({block.replica_id})' if block.replica_id else ''}"
    return [
        block.block,
        f"{block.state}{' (moving)' if block.moving else ''}",
        block.generation,
        owner,
        ",".join(map(str, block.holders)) or "-",
        block.request or "-",
        block.key[:8] or "-",
        "-" if block.parent is None else block.parent,
        "-" if block.depth is None else block.depth,
        block.children,
        "-" if block.last_use_s is None else duration(block.last_use_s),
        "-" if block.born_s is None else duration(block.born_s),
        block.mark,
    ]


def _share(hit: int, asked: int) -> str:
    return f"{hit:,} of {asked:,} prompt tokens were cached ({hit / asked:.0%})" if asked else "none asked for yet"


def size(size_bytes: int) -> str:
    """Bytes in a unit that suits them."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes >= one:
            return f"{size_bytes / one:.1f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB"


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    for unit, one in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * one:
            return f"{seconds / one:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
