"""Looking keys up, through the pool: keys made by hand so that they share a home in the index, or a tag.

A key's first 8 bytes name its home, the next 4 are its tag. Entries lie in a window of 32 behind the home.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from kvpool import BlockTable
    from tests.kvpool.conftest import MakeRig, Rig

WINDOW = 32


def key(home: int, tag: int = 0, rest: int = 0) -> bytes:
    return home.to_bytes(8, "little") + tag.to_bytes(4, "little") + rest.to_bytes(4, "little")


def put(rig: Rig, name: bytes) -> BlockTable:
    """A request that has one block, sealed under this key."""
    table = rig.pool.table("put")
    assert rig.pool.allocate(table, 1)
    rig.pool.seal(table, 0, name, [1, 2])
    return table


def cache(rig: Rig, name: bytes) -> None:
    """Leaves one block cached under this key; a tick later."""
    rig.pool.release(put(rig, name))
    rig.tick()


def found(rig: Rig, *names: bytes) -> list[bool]:
    return [rig.pool.peek([name]) == 1 for name in names]


def test_the_whole_key_is_compared(rig: Rig) -> None:
    for name in (key(5, 1, 1), key(5, 1, 2), key(5, 2, 1)):
        cache(rig, name)
    assert found(rig, key(5, 1, 1), key(5, 1, 2), key(5, 2, 1)) == [True] * 3
    assert found(rig, key(5, 1, 3), key(5, 3, 1), key(6, 1, 1), key(5 + 2**40, 1, 1)) == [False] * 4
    assert rig.pool.stats().blocks["cached"] == 3


def test_a_removed_entry_hides_no_other(rig: Rig) -> None:
    """All have one home, the last entry of the index, so they wrap around."""
    names = [key(15, tag) for tag in range(4)]
    for name in names:
        cache(rig, name)
    assert rig.pool.evict(2) == 2
    assert found(rig, *names) == [False, False, True, True]
    cache(rig, names[0])
    assert found(rig, *names) == [True, False, True, True]
    assert rig.pool.evict(3) == 3
    control = rig.region.control()
    assert not any(control.index)
    control.release()


def test_a_full_window_keeps_a_block_private_until_there_is_room(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=64)
    names = [key(7, tag) for tag in range(WINDOW)]
    for name in names:
        cache(rig, name)
    late, below = key(7, WINDOW), key(9)
    table = put(rig, late)
    assert rig.pool.allocate(table, 1)
    rig.pool.seal(table, 1, below, [3, 4])  # it could be indexed, but what it follows is not
    assert found(rig, *names, late, below) == [True] * WINDOW + [False, False]
    assert rig.pool.stats().blocks["sealed"] == 2
    assert rig.pool.stats().unindexed["full"] > 0
    assert rig.pool.stats().unindexed["contended"] == 0
    assert rig.pool.tidy().late_indexed == 0
    assert rig.pool.evict(1) == 1
    assert rig.pool.tidy().late_indexed == 2
    assert rig.pool.peek([late, below]) == 2
    assert rig.pool.check_integrity() == ""
    rig.pool.release(table)
    assert rig.pool.stats().blocks["cached"] == WINDOW + 1


def test_late_is_too_late(make_rig: MakeRig) -> None:
    """While a block waited for room, another request indexed its key: a tidy pass leaves the waiting one alone."""
    rig = make_rig(capacity_blocks=64)
    for tag in range(WINDOW):
        cache(rig, key(7, tag))
    one, other = put(rig, key(7, WINDOW)), put(rig, key(7, WINDOW))
    assert one.blocks != other.blocks
    assert rig.pool.evict(1) == 1
    third = put(rig, key(7, WINDOW))
    assert rig.pool.tidy().late_indexed == 0
    assert len({table.block(0) for table in (one, other, third)}) == 3
    assert rig.pool.stats().blocks["sealed"] == 2
    for table in (one, other, third):
        rig.pool.release(table)
    assert rig.pool.stats().blocks["cached"] == WINDOW


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60))
def test_agrees_with_a_list_for_ever(make_rig: MakeRig, steps: list[tuple[int, int, bool]]) -> None:
    """Homes collide on purpose, and far more keys come and go than there are entries."""
    rig = make_rig(capacity_blocks=8)
    model: list[bytes] = []  # oldest first
    names = [key(home, tag) for home in range(4) for tag in range(3)]
    for home, tag, drop in steps:
        name = key(home, tag)
        if drop and model:
            assert rig.pool.evict(1) == 1
            del model[0]
        else:
            if name in model:
                model.remove(name)
            elif len(model) == 8:
                del model[0]
            elif len(model) == 7:  # sealing needs a block of its own before it finds the other
                pass
            cache(rig, name)
            model.append(name)
        assert found(rig, *names) == [name in model for name in names]
