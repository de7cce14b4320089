from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool import layout, words
from kvpool.blocks import Blocks
from kvpool.words import FREE, INDEXED, LOCAL, MUTABLE, NO_SLOT, SEALED

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


class Bench:
    """Blocks in slot 5 of a region whose own pool does not look on."""

    def __init__(self, rig: Rig) -> None:
        rig.damaged = True
        self.control = rig.region.control()
        self.leaves: list[int] = []
        self.blocks = Blocks(self.control, 5, self.leaves.append)

    def local_words(self) -> list[int]:
        start = 5 * layout.SLOT_BYTES // 8 + layout.SLOT_WORDS["local_cache"]
        return list(self.control.slots[start : start + 4])

    def index(self, block: int) -> None:
        self.blocks.move(block, SEALED, 5)
        self.blocks.move(block, INDEXED, NO_SLOT)


@pytest.fixture
def bench(rig: Rig) -> Bench:
    return Bench(rig)


def test_takes_the_lowest_free_blocks(bench: Bench) -> None:
    assert bench.blocks.take(3, tag=9) == [0, 1, 2]
    assert bench.blocks.take(2, tag=9) == [3, 4]
    assert bench.control.free[0] == 0b11100000
    assert bench.control.state[4] == words.pack(MUTABLE, 5, 0)
    assert bench.control.holders[4] == 1 << 5
    assert bench.control.request_tag[4] == 9
    assert (bench.blocks.free, bench.blocks.held) == (3, 5)
    assert bench.control.dirty[0] & 0b11111 == 0b11111


def test_the_first_four_given_back_are_cached_in_the_slot(bench: Bench) -> None:
    taken = bench.blocks.take(6, tag=0)
    bench.blocks.drop_all(taken, 1)
    assert bench.blocks.local == [0, 1, 2, 3]
    assert bench.local_words() == [1, 2, 3, 4]
    assert bench.blocks.free == 4
    assert [bench.blocks.state(block) for block in range(6)] == [LOCAL] * 4 + [FREE] * 2
    assert [words.generation_of(bench.control.state[block]) for block in range(7)] == [1] * 6 + [0]
    assert bench.blocks.take(5, tag=0) == [3, 2, 1, 0, 4]
    assert bench.local_words() == [0, 0, 0, 0]


def test_flush_local(bench: Bench) -> None:
    bench.blocks.drop_all(bench.blocks.take(2, tag=0), 1)
    bench.blocks.flush_local()
    assert (bench.blocks.free, bench.blocks.local, bench.local_words()) == (8, [], [0] * 4)
    assert bench.control.free[0] == 0xFF


def test_a_free_bit_is_only_a_hint(bench: Bench) -> None:
    assert bench.blocks.take(2, tag=0) == [0, 1]
    bench.control.free[0] |= 0b11  # stale: both are MUTABLE
    bench.blocks._cursor = 0
    assert bench.blocks.take(2, tag=0) == [2, 3]
    assert bench.control.free[0] == 0b11110000


def test_a_lost_free_bit_is_restored(bench: Bench) -> None:
    bench.control.free[0] = 0b1
    assert sorted(bench.blocks.take(8, tag=0)) == list(range(8))
    assert bench.control.free[0] == 0


def test_takes_fewer_when_there_are_fewer(bench: Bench) -> None:
    assert len(bench.blocks.take(9, tag=0)) == 8
    assert bench.blocks.take(1, tag=0) == []


def test_several_bitmap_words(make_rig: MakeRig) -> None:
    bench = Bench(make_rig(capacity_blocks=130))
    assert bench.blocks.take(130, tag=0) == list(range(130))
    bench.blocks.drop_all([129, 70, 3, 4, 64, 128], 1)
    assert sorted(bench.blocks.local) == [3, 4, 70, 129]
    assert sorted(bench.blocks.take(6, tag=0)) == [3, 4, 64, 70, 128, 129]
    bench.control.release()


def test_holding_an_indexed_block(bench: Bench) -> None:
    (block,) = bench.blocks.take(1, tag=0)
    bench.index(block)
    bench.blocks.hold(block)
    bench.blocks.drop(block, 50)
    assert (bench.blocks.idle, bench.leaves, bench.blocks.held) == (0, [], 1)
    bench.blocks.drop(block, 60)
    assert (bench.blocks.idle, bench.leaves, bench.blocks.held) == (1, [block], 0)
    assert bench.control.last_use[block] == 60
    assert bench.control.holders[block] == 0
    bench.blocks.hold(block)
    assert (bench.blocks.idle, bench.blocks.held) == (0, 1)
    assert bench.blocks.counter("peak_holders") == 2


def test_another_slots_hold_keeps_a_block_from_being_idle(bench: Bench) -> None:
    (block,) = bench.blocks.take(1, tag=0)
    bench.index(block)
    bench.control.holders[block] |= 1 << 9
    bench.blocks.drop(block, 60)
    assert (bench.blocks.idle, bench.leaves) == (0, [])
    assert bench.control.holders[block] == 1 << 9


def test_a_parent_does_not_become_an_idle_leaf(bench: Bench) -> None:
    (block,) = bench.blocks.take(1, tag=0)
    bench.index(block)
    bench.control.children[block] = 1
    bench.blocks.drop(block, 60)
    assert (bench.blocks.idle, bench.leaves) == (1, [])


def test_t4_giving_back_twice_is_caught(bench: Bench) -> None:
    (block,) = bench.blocks.take(1, tag=0)
    with pytest.raises(AssertionError, match="block 0 is given back more often than it was held"):
        bench.blocks.drop_all([block, block], 1)
    assert (bench.blocks.free, len(bench.blocks.local)) == (7, 1)


def test_owned(bench: Bench) -> None:
    one, other = bench.blocks.take(2, tag=0)
    assert bench.blocks.owned(one)
    bench.blocks.move(one, SEALED, 5)
    assert not bench.blocks.owned(one)
    bench.control.state[other] = words.pack(MUTABLE, 6, 0)
    assert not bench.blocks.owned(other)


def test_counters(bench: Bench) -> None:
    bench.blocks.count("evictions", 3)
    bench.blocks.count("evictions")
    bench.blocks.count_peak("peak_used_blocks", 5)
    bench.blocks.count_peak("peak_used_blocks", 2)
    assert bench.blocks.counter("evictions") == 4
    assert bench.blocks.counter("peak_used_blocks") == 5
