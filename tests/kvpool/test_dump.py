"""What a person sees who looks at a region: the truth, whatever its processes do."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from kvpool import BlockGeometry, KeyRoot, KeySpace, Pool, Region, SlotLoad
from kvpool.dump import LOOKS, BlockFilter, check_region, count_blocks, describe_region, dump_blocks
from kvpool.region_view import RegionView
from kvpool.words import EVICTING, INDEXED, pack

GEOMETRY = BlockGeometry(1, 1, 4, 2, "float32")
SPACE = KeySpace(bytes(32))
ROOT = SPACE.root(KeyRoot("m", 2, "float32"))
TOKENS = [1, 2, 3, 4, 5]
NOW = 9_000_000_000


@dataclass
class Scene:
    """One region with two processes: the first has computed TOKENS and reads it, the second reads its two full blocks."""

    region: Region
    first: Pool
    second: Pool
    blocks: list[int]
    view: RegionView

    def dump(self, **which: object) -> list[int]:
        count, found = dump_blocks(self.view, BlockFilter(**which))  # type: ignore[arg-type]
        assert count == len(found)
        return [each.block for each in found]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    region = Region.create(tmp_path, "kvatlas-scene", GEOMETRY, 16, bytes(range(32)), random.Random(3), bytes(16))
    attached = Region.attach(region.path)
    first = Pool.create(region, clock=lambda: 4_000_000_000, floor_blocks=3, guard=True)
    second = Pool.create(attached, clock=lambda: 7_000_000_000)
    keys = SPACE.block_keys(ROOT, TOKENS, 2)
    table = first.table("the-request-that-writes")
    assert first.allocate(table, 3)
    for position, key in enumerate(keys):
        first.seal(table, position, key, TOKENS[2 * position : 2 * position + 2])
    reading = second.table("reads")
    assert second.match(reading, keys) == 2
    first.report_load(SlotLoad("replica-a", 700, 2, 1, 1234.5))
    second.wait_in_line(5)
    with RegionView(region.path) as view:
        yield Scene(region, first, second, table.blocks, view)
    for pool in (second, first):
        if not pool.region.closed:
            pool.close()
            pool.region.close()


def test_a_report_of_a_region(scene: Scene) -> None:
    report = describe_region(scene.view, lambda: NOW)
    assert (report.path, report.live, report.capacity_blocks) == (str(scene.region.path), True, 16)
    assert report.fingerprint == bytes(range(32)).hex()
    assert report.owner == "00" * 16
    assert int(report.incarnation, 16) == scene.region.incarnation
    assert report.geometry == GEOMETRY
    assert report.file_bytes == scene.region.path.stat().st_size
    assert report.blocks == scene.first.stats().blocks == {**report.blocks, "mutable": 1, "held": 2, "free": 13}
    assert (report.used_blocks, report.free_blocks) == (3, 13)
    assert report.totals.allocations["free"] == 3
    first, second = report.slots
    assert (first.slot, first.pid, first.alive, first.replica_id) == (0, os.getpid(), True, "replica-a")
    assert (first.used_blocks, first.floor_blocks, first.ticket) == (3, 3, 0)
    assert (first.queued_prefill_tokens, first.running, first.waiting) == (700, 2, 1)
    assert first.prefill_tokens_per_s == 1234.5
    assert first.heartbeat_s == 5.0
    assert first.running_s is not None
    assert 0 < first.running_s < 86400
    assert (second.slot, second.used_blocks, second.wanted_blocks) == (1, 2, 5)
    assert second.ticket > 0
    assert json.loads(json.dumps(asdict(report)))["blocks"]["held"] == 2


def test_an_orphan(scene: Scene) -> None:
    for pool in (scene.second, scene.first):
        pool.close()
        pool.region.close()
    report = describe_region(scene.view)
    assert not report.live
    assert report.slots == ()
    assert report.blocks["cached"] == 2
    assert report.totals.allocations["free"] == 3
    assert check_region(scene.view) == ""


def test_blocks_one_by_one(scene: Scene) -> None:
    count, (head, tail, last) = dump_blocks(scene.view, BlockFilter(request="that-writes"), now_ns=lambda: NOW)
    assert count == 3
    assert [head.block, tail.block, last.block] == scene.blocks
    keys = SPACE.block_keys(ROOT, TOKENS, 2)
    assert (head.state, head.slot, head.pid, head.holders) == ("INDEXED", None, 0, (0, 1))
    assert (head.key, head.parent, head.depth, head.children) == (keys[0].hex(), None, 0, 1)
    assert (tail.key, tail.parent, tail.depth, tail.children) == (keys[1].hex(), head.block, 1, 0)
    assert (tail.born_s, tail.last_use_s, tail.filled_tokens) == (5.0, 2.0, 2)
    assert tail.request == "the-request-that-writes"
    assert tail.mark.startswith("checksum ")
    what = f"by process {os.getpid()} (replica-a) in slot 0 5.000 s ago"
    assert tail.history == (f"sealed {what}", f"taken {what}")
    assert (last.state, last.slot, last.pid, last.replica_id) == ("MUTABLE", 0, os.getpid(), "replica-a")
    assert (last.key, last.parent, last.depth, last.born_s, last.last_use_s) == ("", None, None, None, None)
    assert (last.mark, last.holders) == ("none", ())


def test_the_mark_of_a_free_block(scene: Scene) -> None:
    table = scene.first.table("short")
    assert scene.first.allocate(table, 1)
    block = table.block(0)
    scene.first.release(table)
    (found,) = dump_blocks(scene.view, BlockFilter(block=block))[1]
    assert (found.state, found.mark, found.history[0].split()[:2]) == ("FREE", "poison", ["given", "back"])


def test_which_blocks(scene: Scene) -> None:
    head, tail, last = scene.blocks
    assert scene.dump() == list(range(16))
    assert scene.dump(block=5) == [5]
    assert scene.dump(state="indexed") == sorted([head, tail])
    assert scene.dump(slot=1) == sorted([head, tail])
    assert scene.dump(slot=0) == sorted(scene.blocks)
    assert scene.dump(slot=0, state="MUTABLE", request="writes") == [last]
    assert scene.dump(request="nobody") == []
    count, found = dump_blocks(scene.view, BlockFilter(), limit=4)
    assert (count, [each.block for each in found]) == (16, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (BlockFilter(block=16), "blocks 0 to 15"),
        (BlockFilter(state="BUSY"), "FREE, LOCAL"),
        (BlockFilter(slot=64), "slots 0 to 63"),
    ],
)
def test_a_filter_that_nothing_can_fit(scene: Scene, which: BlockFilter, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dump_blocks(scene.view, which)


def test_any_words_can_be_shown(scene: Scene) -> None:
    """Whatever a stray write left there, a dump names it and does not fail."""
    control, rng = scene.first._control, random.Random(4)
    names = ("state", "holders", "children", "parent", "filled", "last_use", "born", "checksum", "history")
    kept = {name: getattr(control, name).tolist() for name in names}
    for _ in range(20):
        for name in names:
            for place in range(16):
                getattr(control, name)[place] = rng.getrandbits(64)
        count, found = dump_blocks(scene.view, BlockFilter())
        assert count == 16
        assert sum(count_blocks(scene.view.control).values()) == 16
        json.dumps([asdict(each) for each in found], allow_nan=False)
        assert isinstance(check_region(scene.view, lambda _: None), str)
    for name in names:
        for place, word in enumerate(kept[name]):
            getattr(control, name)[place] = word


def test_a_block_that_keeps_changing_says_so(scene: Scene) -> None:
    class Restless:
        """The state words of a block that starts a new life at every look."""

        def __init__(self) -> None:
            self.life = 0

        def __getitem__(self, block: int) -> int:
            self.life += 1
            return pack(INDEXED, -1, self.life)

    control = scene.view.control
    state = control.state
    control.state = Restless()  # type: ignore[assignment]
    numbers: Callable[..., list[int]] = lambda self, control: [0]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockFilter, "numbers", numbers)
        (found,) = dump_blocks(scene.view, BlockFilter())[1]
    control.state = state
    assert found.moving


def test_a_violation_in_a_living_region_counts_when_it_stays(scene: Scene) -> None:
    control = scene.first._control
    block = scene.blocks[1]
    kept = int(control.state[block])
    pauses: list[float] = []

    def busy(seconds: float) -> None:
        """An eviction is under way at the first look, and over at the third."""
        pauses.append(seconds)
        if len(pauses) == 2:
            control.state[block] = kept

    control.state[block] = kept & ~0xFFFF | 2 << 8 | EVICTING
    assert check_region(scene.view, busy) == ""
    assert len(pauses) == 2
    control.state[block] = kept & ~0xFFFF | 2 << 8 | EVICTING
    assert f"block {block} was left EVICTING" in check_region(scene.view, pauses.append)
    assert len(pauses) == 2 + LOOKS - 1
    control.state[block] = kept


DYING = """
import os, signal, sys
from kvpool import Pool, Region, SlotLoad
pool = Pool.create(Region.attach(sys.argv[1]))
pool.report_load(SlotLoad("replica-b", 0, 0, 0, 0.0))
assert pool.allocate(pool.table("doomed"), 2)
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_was_killed(scene: Scene) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(scene.region.path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    dead = describe_region(scene.view).slots[-1]
    assert (dead.pid, dead.alive, dead.replica_id) == (int(done.stdout), False, "replica-b")
    assert (dead.used_blocks, dead.running_s) == (2, None)
    found = dump_blocks(scene.view, BlockFilter(slot=dead.slot))[1]
    assert [(each.state, each.pid, each.request) for each in found] == [("MUTABLE", dead.pid, "doomed")] * 2
    scene.first.reclaim()
    assert len(describe_region(scene.view).slots) == 2
