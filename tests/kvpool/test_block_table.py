from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


def test_a_new_table_is_empty_and_open(rig: Rig) -> None:
    table = rig.pool.table("r1")
    assert (table.request_id, table.blocks, table.keys, table.closed) == ("r1", [], [], False)
    assert repr(table) == "<BlockTable 'r1': 0 blocks, 0 sealed>"


def allocate_and_fail(rig: Rig) -> None:
    with rig.pool.table("r2") as table:
        assert rig.pool.allocate(table, 2)
        raise ZeroDivisionError


def test_with_gives_back_on_every_path(rig: Rig) -> None:
    with rig.pool.table("r1") as table:
        assert rig.pool.allocate(table, 3)
        assert rig.pool.held_blocks() == 3
    assert table.closed
    with pytest.raises(ZeroDivisionError):
        allocate_and_fail(rig)
    assert rig.pool.held_blocks() == 0
    assert rig.pool.stats().second_releases == 0


def test_release_inside_a_with_is_no_second_release(rig: Rig) -> None:
    with rig.pool.table("r1") as table:
        rig.pool.release(table)
    assert rig.pool.stats().second_releases == 0
    assert table.close() == 0
    assert rig.pool.stats().second_releases == 1


def test_blocks_is_a_copy(rig: Rig) -> None:
    with rig.pool.table("r1") as table:
        assert rig.pool.allocate(table, 2)
        before = table.blocks
        before.clear()
        assert (len(table.blocks), len(table), bool(table)) == (2, 2, True)
    assert (table.blocks, len(table), bool(table)) == ([], 0, True)


def test_a_long_table(make_rig: MakeRig) -> None:
    """Room for block numbers grows with the request, and a table that is used again begins empty."""
    rig = make_rig(capacity_blocks=300)
    for _ in range(2):
        with rig.pool.table("long") as table:
            assert table.blocks == []
            for count in (1, 55, 1, 200, 43):
                assert rig.pool.allocate(table, count)
            assert sorted(table.blocks) == list(range(300))
            assert rig.pool.check_integrity() == ""


@pytest.mark.parametrize(
    ("request_id", "label"),
    [("short", "short"), ("x" * 40 + "-choice-1", "x" * 23 + "-choice-1"), ("x" * 31 + "é", "x" * 30 + "é")],
)
def test_a_block_names_who_writes_it(rig: Rig, request_id: str, label: str) -> None:
    """By the last 32 bytes of the request's id, also after a longer id had the record before."""
    rig.pool.release(rig.run("y" * 64, [1, 2, 3]))
    with rig.pool.table(request_id) as table:
        assert rig.pool.allocate(table, 1)
        control = rig.region.control()
        assert control.label(table.blocks[0]) == label
        control.release()
