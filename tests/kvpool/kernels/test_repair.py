"""What deaths leave behind, prepared by hand, and what one pass makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout import HEADER_WORDS

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


def test_lost_free_bits_come_back_and_wrong_ones_go(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=130)
    table = rig.run("r", list(range(20)))
    control = rig.region.control()
    control.free[0] &= ~(7 << 50)
    control.free[2] = 0
    control.free[0] |= 1 << table.blocks[0]
    assert rig.pool.tidy().restored_bits == 5
    assert rig.pool.check_integrity() == ""
    assert rig.pool.tidy().restored_bits == 0
    control.release()
    rig.pool.release(table)


def test_blocks_without_free_bits_are_found_when_nothing_else_is_left(rig: Rig) -> None:
    control = rig.region.control()
    control.free[0] = 0
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 8)
    assert sorted(table.blocks) == list(range(8))
    control.release()
    rig.pool.release(table)


def test_a_wrong_free_bit_gives_nobody_a_block(rig: Rig) -> None:
    held = rig.run("held", [1, 2, 3, 4])
    control = rig.region.control()
    control.free[0] = 0xFF
    table = rig.pool.table("r")
    assert not rig.pool.allocate(table, 7)
    assert rig.pool.allocate(table, 6)
    assert not set(table.blocks) & set(held.blocks)
    control.release()
    rig.pool.release(table)
    rig.pool.release(held)
    rig.pool.tidy()


def test_children_too_many_are_counted_anew(rig: Rig) -> None:
    blocks = rig.cache([1, 2, 3, 4])
    control = rig.region.control()
    control.children[blocks[0]] += 1
    control.children[blocks[1]] += 3
    assert rig.pool.evict(8) == 0
    control.header[HEADER_WORDS["recount"]] = 1
    assert rig.pool.tidy().recounted == 2
    assert control.header[HEADER_WORDS["recount"]] == 0
    assert rig.pool.evict(8) == 2
    control.release()


def test_children_too_many_keep_no_request_waiting(rig: Rig) -> None:
    """Blocks that cannot be evicted for a wrong count are there for an allocation, without a tidy pass."""
    rig.cache([1, 2, 3, 4, 5, 6])
    control = rig.region.control()
    for block in range(3):
        control.children[block] += 1
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 8)
    control.release()
    rig.pool.release(table)


def test_right_counts_are_left_alone(rig: Rig) -> None:
    tables = [rig.run(name, tokens) for name, tokens in {"a": [1, 2, 3, 4], "b": [1, 2, 5, 6]}.items()]
    control = rig.region.control()
    before = list(control.children)
    control.header[HEADER_WORDS["recount"]] = 1
    assert rig.pool.tidy().recounted == 0
    assert list(control.children) == before
    control.release()
    for table in tables:
        rig.pool.release(table)


def test_lost_free_blocks_and_idle_ones_together_are_enough(rig: Rig) -> None:
    rig.cache([1, 2, 3, 4])
    control = rig.region.control()
    control.free[0] = 0
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 8)
    assert rig.pool.stats().evictions["idle"] == 2
    control.release()
    rig.pool.release(table)
