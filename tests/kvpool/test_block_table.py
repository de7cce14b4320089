from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool.block_table import request_tag

if TYPE_CHECKING:
    from tests.kvpool.conftest import Rig


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


def test_tags_tell_requests_apart() -> None:
    assert request_tag("a") != request_tag("b")
    assert request_tag("a") == request_tag("a") < 2**64
