"""The index's windows: full ones, contended ones, and keys that meet in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout import WINDOW

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


def crowded(number: int) -> bytes:
    """A key whose window is that of all others made here."""
    return bytes(8) + number.to_bytes(8, "little")


def seal_one(rig: Rig, key: bytes) -> int:
    """Caches one block under `key`; returns its number."""
    table = rig.pool.table("r")
    assert rig.pool.allocate(table, 1)
    block = rig.pool.seal(table, 0, key, [1, 2])
    rig.pool.release(table)
    return block


def test_keys_that_meet_in_one_window_are_all_found(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=64)
    keys = [crowded(number) for number in range(WINDOW)]
    for key in keys:
        seal_one(rig, key)
    assert all(rig.pool.peek([key]) == 1 for key in keys)
    assert rig.pool.peek([crowded(WINDOW)]) == 0
    assert rig.pool.evict(10) == 10
    assert [rig.pool.peek([key]) for key in keys] == [0] * 10 + [1] * (WINDOW - 10)
    for key in keys[:10]:
        seal_one(rig, key)
    assert all(rig.pool.peek([key]) == 1 for key in keys)


def test_a_full_window_leaves_a_block_private_until_there_is_room(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=64)
    for number in range(WINDOW):
        seal_one(rig, crowded(number))
        rig.tick()
    table = rig.pool.table("late")
    assert rig.pool.allocate(table, 2)
    late = crowded(99)
    rig.pool.seal(table, 0, late, [1, 2])
    assert rig.pool.stats().unindexed == {"contended": 0, "full": 1}
    assert rig.pool.stats().blocks["sealed"] == 1
    assert rig.pool.peek([late]) == 0
    assert rig.pool.tidy().late_indexed == 0
    assert rig.pool.evict(1) == 1
    assert rig.pool.tidy().late_indexed == 1
    assert rig.pool.peek([late]) == 1
    assert rig.pool.check_integrity() == ""
    rig.pool.release(table)
    assert rig.pool.peek([late]) == 1


def test_what_follows_a_block_that_came_late_comes_with_it(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=64)
    for number in range(WINDOW):
        seal_one(rig, crowded(number))
    table = rig.pool.table("late")
    assert rig.pool.allocate(table, 3)
    chain = [crowded(99), b"a" * 16, b"b" * 16]
    for position, key in enumerate(chain):
        rig.pool.seal(table, position, key, [position, position])
    assert rig.pool.stats().blocks["sealed"] == 3
    rig.pool.evict(1)
    assert rig.pool.tidy().late_indexed == 3
    assert rig.pool.peek(chain) == 3
    assert rig.pool.stats().late_indexed == 3
    rig.pool.release(table)


def test_an_entry_of_somebody_in_the_middle_of_sealing_is_respected(rig: Rig) -> None:
    """Another process has entered the key and not published it: nobody enters it twice. Later its block is used, when the
    request seals its next one: not by a tidy pass, because a step may be reading the request's own block.
    """
    blocks = rig.cache([1, 2])
    control = rig.region.control()
    indexed = control.state[blocks[0]]
    control.state[blocks[0]] = indexed & ~0xFF | 4 | 8 << 8  # SEALED, of slot 7
    table = rig.pool.table("same")
    assert rig.pool.allocate(table, 2)
    own, following = table.blocks
    keys = rig.keys([1, 2, 3, 4])
    assert rig.pool.seal(table, 0, keys[0], [1, 2]) == own
    assert rig.pool.peek(keys) == 0
    control.state[blocks[0]] = indexed
    assert rig.pool.tidy().late_indexed == 0
    assert table.blocks == [own, following]
    assert rig.pool.seal(table, 1, keys[1], [3, 4]) == following
    assert table.blocks == [*blocks, following]
    assert rig.pool.peek(keys) == 2
    assert (rig.pool.stats().dedups, rig.pool.stats().late_indexed) == (1, 1)
    control.release()
    rig.pool.release(table)
