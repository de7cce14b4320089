"""One run of the pool benchmark: processes, phases, and the figures made of them.

Rounds. Every round does each phase once, and phases are short: a shared machine changes its speed from second to second, by
as much as 1.8 times. A figure is the median over the rounds, a ratio the median of the rounds' ratios.

    pairs_1      one process on the region, the two processes in turns
    python       one process, a pool in plain Python
    match        one request, 1,000 indexed blocks
    pairs_2      both at the same time; their pairs by the time from the first one's begin to the last one's end
    flock_2      the same, each operation under one flock on one file
    reclaim      a third process holds 10,000 blocks (half of them indexed) and is killed; how long a survivor takes

Then the tidy pass, part by part, and the start of a region of the usual size. Regions have names of this run only and are
removed on every path; what an earlier run could not remove, because it was killed, goes at the start of the next.

Limits: Linux; must be used from the main thread, which receives the signals. Two processes on one core, where there is but
one, measure the scheduler (`cores` says so).
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from cluster.bench import pool_startup, pool_tidy
from cluster.bench.pool_plan import HELD_BLOCKS, MATCH_BLOCKS, PAIR_BLOCKS, Plan
from cluster.bench.pool_process import BenchFailed, Worker, cores, start_together, workers
from cluster.bench.server import signals_as_interrupts
from kvpool import BlockGeometry, Region, layout, sweep

PREFIX: Final = "kvatlas-bench-"
GEOMETRY: Final = BlockGeometry(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
WARM_UP_S: Final = 0.2
STARTUPS: Final = 3
"""The large region is made so often at most: half a second and 1.5 GB each."""


def measure(plan: Plan, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs it all, with regions in `directory`, and returns the report. `say` hears of progress.

    Raises BenchFailed when a process of it fails, PoolError when a region does not fit.
    """
    load = os.getloadavg()[0]
    with signals_as_interrupts(), regions(directory) as name, workers(2) as pair:
        with Region.create(
            directory, name, GEOMETRY, plan.capacity_blocks, bytes(layout.FINGERPRINT_BYTES), random.SystemRandom()
        ) as region:
            rounds = [_round(plan, number, region.path, pair, say) for number in range(plan.rounds)]
        tidy = {}
        for part in pool_tidy.PARTS:
            say(f"tidy: {part}")
            tidy[part] = pair[0].ask("tidy", part=part, directory=str(directory), name=f"{name}-{part}")
        started = startup(plan, directory, name, pair, say)
    return {
        **figures(rounds),
        "tidy": tidy,
        "startup": started,
        "capacity_blocks": plan.capacity_blocks,
        "seconds": plan.seconds,
        "rounds": plan.rounds,
        "load_before": load,
        "cores": cores(2, os.sched_getaffinity(0)),
        "by_round": rounds,
    }


@contextlib.contextmanager
def regions(directory: Path) -> Iterator[str]:
    """A name that nobody has; at the end every file in `directory` goes whose name begins with it."""
    sweep(directory, PREFIX)
    name = f"{PREFIX}{secrets.token_hex(6)}"
    try:
        yield name
    finally:
        for path in directory.glob(f"{name}*"):
            path.unlink(missing_ok=True)


def _round(plan: Plan, number: int, path: Path, pair: list[Worker], say: Callable[[str], None]) -> dict[str, float]:
    """One round's figures."""
    say(f"round {number + 1} of {plan.rounds}")
    one, other = pair[number % 2], pair[1 - number % 2]
    one.ask("open", path=str(path))
    found = {"pairs_per_s_1": _pairs([one], plan.seconds, "pairs")["pairs_per_s"]}
    found["python_pool_pairs_per_s"] = _pairs(
        [one], plan.seconds, "python_pairs", capacity_blocks=plan.capacity_blocks
    )["pairs_per_s"]
    found["match_us"] = one.ask("match", blocks=MATCH_BLOCKS, seconds=plan.seconds)["us"]
    other.ask("open", path=str(path))
    both = _pairs(pair, plan.seconds, "pairs")
    found |= {"pairs_per_s_2": both["pairs_per_s"], "cas_tries": both["cas_tries"], "cas_retries": both["cas_retries"]}
    found["flock_pairs_per_s_2"] = _pairs(pair, plan.seconds, "flock_pairs")["pairs_per_s"]
    other.ask("close")
    found["reclaim_ms"] = _reclaim(one, path)
    one.ask("close")
    return found


def _pairs(children: Sequence[Worker], seconds: float, do: str, **arguments: Any) -> dict[str, float]:
    """Pairs of all `children` together, after a warm-up; with the sums of whatever else they counted."""
    start_together(children, min(WARM_UP_S, seconds), do, **arguments)
    spans = start_together(children, seconds, do, **arguments)
    total = {name: sum(span[name] for span in spans) for name in spans[0]}
    took_ns = max(span["last_ns"] for span in spans) - min(span["first_ns"] for span in spans)
    return {**total, "pairs_per_s": total["pairs"] * 1e9 / took_ns}


def _reclaim(survivor: Worker, path: Path) -> float:
    """Milliseconds in which `survivor` takes back what a killed process held in the region at `path`."""
    with Worker(None) as holder:
        holder.ask("open", path=str(path))
        holder.ask("hold", indexed=HELD_BLOCKS // 2, mutable=HELD_BLOCKS - HELD_BLOCKS // 2)
        holder.kill()
    found = survivor.ask("reclaim")
    if (found["held_before"], found["held_after"]) != (HELD_BLOCKS, 0):
        raise BenchFailed(
            f"A killed process should have held {HELD_BLOCKS} blocks and held {found['held_before']}; after they were taken "
            f"back {found['held_after']} are held still: this is a fault of the pool, please report it."
        )
    took_ms: float = found["ms"]
    return took_ms


def startup(
    plan: Plan, directory: Path, name: str, pair: Sequence[Worker], say: Callable[[str], None]
) -> dict[str, Any]:
    """The start of a region of the usual size: medians; or why it was left out."""
    lacking = pool_startup.room_for(directory, plan.startup_blocks)
    if lacking:
        return {"skipped": lacking}
    found: list[dict[str, Any]] = []
    times = min(plan.rounds, STARTUPS)
    for number in range(times):
        say(f"startup {number + 1} of {times}")
        path = directory / f"{name}-startup"
        found.append(pair[0].ask("create", directory=str(directory), name=path.name, blocks=plan.startup_blocks))
        found[-1] |= pair[1].ask("attach", path=str(path))
        path.unlink()
    return {
        "create_s": statistics.median(one["create_s"] for one in found),
        "attach_s": statistics.median(one["attach_s"] for one in found),
        "control_share": found[0]["control_share"],
        "bytes": found[0]["bytes"],
    }


def figures(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The report's figures: medians over `rounds`."""

    def median(name: str, over: str = "") -> float:
        return statistics.median(one[name] / (one[over] if over else 1) for one in rounds)

    one = median("pairs_per_s_1")
    tries = sum(found["cas_tries"] for found in rounds)
    return {
        "pairs_per_s_1": one,
        "pairs_per_s_2": median("pairs_per_s_2"),
        "flock_pairs_per_s_2": median("flock_pairs_per_s_2"),
        "python_pool_pairs_per_s": median("python_pool_pairs_per_s"),
        "ns_per_block": 1e9 / one / PAIR_BLOCKS,
        "match_1000_us": median("match_us"),
        "reclaim_10000_ms": median("reclaim_ms"),
        "cas_retry_share": sum(found["cas_retries"] for found in rounds) / max(1.0, tries),
        "pairs_2_over_1": median("pairs_per_s_2", "pairs_per_s_1"),
        "over_flock": median("pairs_per_s_2", "flock_pairs_per_s_2"),
        "over_python": median("pairs_per_s_1", "python_pool_pairs_per_s"),
    }
