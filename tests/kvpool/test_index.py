from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool import words
from kvpool.control import Control
from kvpool.index import NOT_FOUND, PrefixIndex
from kvpool.words import INDEXED, NO_SLOT

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


class Shelf:
    """An index with blocks put into the INDEXED state by hand."""

    def __init__(self, rig: Rig) -> None:
        rig.damaged = True
        self.control: Control = rig.region.control()
        self.index = PrefixIndex(self.control)

    def put(self, block: int, key: bytes) -> None:
        self.control.set_key(block, key)
        self.index.insert(key, block)
        self.control.state[block] = words.pack(INDEXED, NO_SLOT, 0)

    def take(self, block: int) -> None:
        self.control.state[block] = words.pack(words.FREE, NO_SLOT, 1)
        self.index.remove(self.control.key(block), block)


def key(start: int, tag: int = 0, rest: int = 0) -> bytes:
    return start.to_bytes(8, "little") + tag.to_bytes(4, "little") + rest.to_bytes(4, "little")


def test_find_compares_the_whole_key(rig: Rig) -> None:
    shelf = Shelf(rig)
    shelf.put(0, key(5, 1, 1))
    shelf.put(1, key(5, 1, 2))
    shelf.put(2, key(5, 2, 1))
    assert [shelf.index.find(key(5, tag, rest)) for tag, rest in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1))] == [
        0,
        1,
        2,
        NOT_FOUND,
        NOT_FOUND,
    ]
    shelf.control.release()


def test_a_removed_entry_does_not_cut_the_probes_of_others(rig: Rig) -> None:
    shelf = Shelf(rig)
    for block in range(4):
        shelf.put(block, key(15, block))  # the last position of 16: they wrap around
    shelf.take(1)
    assert shelf.index.tombstones == 1
    assert [shelf.index.find(key(15, block)) for block in range(4)] == [0, NOT_FOUND, 2, 3]
    shelf.put(1, key(15, 9))
    assert shelf.index.tombstones == 0
    for block in (0, 1, 2, 3):
        shelf.take(block)
    assert shelf.index.tombstones == 0
    assert not any(shelf.control.index)
    shelf.control.release()


def test_an_entry_equal_to_a_tombstone_cannot_exist(rig: Rig) -> None:
    shelf = Shelf(rig)
    for block in range(2):
        shelf.put(block, key(3, 0, block))
    shelf.take(0)
    assert shelf.index.find(key(3, 0, 1)) == 1
    assert shelf.index.find(key(3, 0, 0)) == NOT_FOUND
    shelf.control.release()


def test_misuse_is_noticed(rig: Rig) -> None:
    shelf = Shelf(rig)
    shelf.put(0, key(1))
    with pytest.raises(AssertionError, match="indexed already"):
        shelf.index.insert(key(1), 1)
    with pytest.raises(AssertionError, match="block 2 is not in the index"):
        shelf.index.remove(key(1), 2)
    shelf.control.release()


def test_a_new_process_counts_what_is_there(rig: Rig) -> None:
    shelf = Shelf(rig)
    for block in range(3):
        shelf.put(block, key(7, block))
    shelf.take(0)
    again = PrefixIndex(shelf.control)
    assert (again.live, again.tombstones) == (2, 1)
    shelf.control.release()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(0, 2)), max_size=120))
def test_agrees_with_a_dict_for_ever(make_rig: MakeRig, steps: list[tuple[int, int, int]]) -> None:
    """Start positions collide on purpose; many more removals than entries, so tombstones and rebuilds both occur."""
    shelf = Shelf(make_rig(capacity_blocks=8))
    model: dict[bytes, int] = {}
    for block, start, tag in steps:
        if block in model.values():
            old = next(known for known, number in model.items() if number == block)
            del model[old]
            shelf.take(block)
        elif (new := key(start, tag)) not in model:
            model[new] = block
            shelf.put(block, new)
        for probe in (key(start, tag) for start in range(4) for tag in range(3)):
            assert shelf.index.find(probe) == model.get(probe, NOT_FOUND)
        assert shelf.index.live == len(model)
        assert shelf.index.live + shelf.index.tombstones <= 12
    shelf.control.release()


def test_never_fills_up_and_never_degrades(make_rig: MakeRig) -> None:
    """Keys come and go 400 times over; at each moment some entry is empty, and at most three quarters are not."""
    shelf = Shelf(make_rig(capacity_blocks=64))
    generator = iter(range(10**6))
    for block in range(64):
        shelf.put(block, key(next(generator) * 2654435761 % 2**32))
    for _ in range(400):
        for block in range(0, 64, 7):
            shelf.take(block)
            shelf.put(block, key(next(generator) * 2654435761 % 2**32))
        assert list(shelf.control.index).count(0) >= 32
    shelf.control.release()
