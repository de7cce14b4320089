"""Each kind of damage, done by hand, is reported in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from kvpool import Pool, Region, integrity, words
from kvpool.layout import SLOT_WORDS
from kvpool.words import EVICTING, MUTABLE, NO_SLOT

if TYPE_CHECKING:
    from kvpool.control import Control
    from tests.kvpool.conftest import Rig


def free_bit(control: Control, rig: Rig) -> None:
    control.free[0] &= ~(1 << 7)


def free_bit_beyond_the_end(control: Control, rig: Rig) -> None:
    control.free[0] |= 1 << 40


def unknown_state(control: Control, rig: Rig) -> None:
    control.state[7] = 77


def left_in_passing(control: Control, rig: Rig) -> None:
    control.state[2] = words.pack(EVICTING, 0, 0)


def lost_index_entry(control: Control, rig: Rig) -> None:
    position = next(position for position, entry in enumerate(control.index) if entry)
    control.index[position] = 0


def moved_index_entry(control: Control, rig: Rig) -> None:
    position = next(position for position, entry in enumerate(control.index) if entry)
    entries = len(control.index)
    target = (position + 40) % entries
    assert control.index[target] == 0
    control.index[target], control.index[position] = control.index[position], 0


def index_entry_to_nowhere(control: Control, rig: Rig) -> None:
    position = next(position for position, entry in enumerate(control.index) if entry)
    control.index[position] += 50


def changed_key(control: Control, rig: Rig) -> None:
    control.set_key(0, bytes(16))


def stray_index_entry(control: Control, rig: Rig) -> None:
    control.index[control.index.tolist().index(0)] = 9 << 32 | 8


def orphaned_child(control: Control, rig: Rig) -> None:
    control.parent[1] = 1 << 32 | 8


def wrong_depth(control: Control, rig: Rig) -> None:
    control.parent[1] = 5 << 32 | 1


def damaged_parent(control: Control, rig: Rig) -> None:
    control.parent[1] = 1 << 32 | 400


def too_few_children(control: Control, rig: Rig) -> None:
    control.children[0] = 0


def missing_holder_bit(control: Control, rig: Rig) -> None:
    control.holders[3] = 0


def leaked_block(control: Control, rig: Rig) -> None:
    rig.pool._tables.clear()


def wrong_refs(control: Control, rig: Rig) -> None:
    rig.pool._context.refs[3] += 1


def shared_mutable(control: Control, rig: Rig) -> None:
    table = rig.pool.table("thief")
    table._words[0], table._words[8] = 1, 4
    rig.pool._tables.add(table)
    rig.pool._context.refs[4] += 1


def twice_in_one_table(control: Control, rig: Rig) -> None:
    (table,) = rig.pool._tables
    table._words[0], table._words[11] = 4, 3
    rig.pool._context.refs[3] += 1


def other_key_in_table(control: Control, rig: Rig) -> None:
    (table,) = rig.pool._tables
    table.keys[0] = bytes(16)


def closed_but_open(control: Control, rig: Rig) -> None:
    (table,) = rig.pool._tables
    table.closed = True


def wrong_local_cache(control: Control, rig: Rig) -> None:
    control.slots[SLOT_WORDS["local_cache"]] = 7


def mutable_without_holder(control: Control, rig: Rig) -> None:
    control.state[7] = words.pack(MUTABLE, 0, 0)
    control.free[0] &= ~(1 << 7)


def held_but_free(control: Control, rig: Rig) -> None:
    control.state[4] = words.pack(words.FREE, NO_SLOT, 0)
    control.free[0] |= 1 << 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (free_bit, "block 7 has free bit 0 but is FREE"),
        (free_bit_beyond_the_end, "beyond the last block"),
        (unknown_state, "block 7 was left state 77?"),
        (left_in_passing, "block 2 was left EVICTING"),
        (lost_index_entry, "is INDEXED and in the index a different number of times"),
        (moved_index_entry, "a look-up of its key does not reach it"),
        (index_entry_to_nowhere, "points beyond the blocks"),
        (changed_key, "a look-up of its key does not reach it"),
        (stray_index_entry, "the index points to block 7, which is FREE"),
        (orphaned_child, "block 1 is INDEXED but its parent is not: the index is not prefix-closed"),
        (wrong_depth, "one deeper than its parent"),
        (damaged_parent, "damaged parent word"),
        (too_few_children, "block 0 counts 0 children, it has 1"),
        (missing_holder_bit, "block 3 has 1 holders here, its bit of slot 0 says otherwise"),
        (leaked_block, "block 2 has 1 holders by its count, 0 by the open tables"),
        (wrong_refs, "block 3 has 2 holders by its count, 1 by the open tables"),
        (shared_mutable, "block 4 is MUTABLE, generation 0, owner slot 0 but '"),
        (twice_in_one_table, "a block is twice in the table of 'r'"),
        (other_key_in_table, "position 0 of 'r' has another key than its block"),
        (closed_but_open, "the table of 'r' is closed but still counted as open"),
        (wrong_local_cache, "the local cache of slot 0 lists [6], the blocks say []"),
        (mutable_without_holder, "block 7 is MUTABLE, generation 0, owner slot 0 but no request holds it: it is lost"),
        (held_but_free, "block 4 is in the table of 'r' but is FREE"),
    ],
)
def test_damage_is_named(rig: Rig, damage: Callable[[Control, Rig], None], message: str) -> None:
    rig.cache([1, 2, 3, 4])  # blocks 0, 1
    rig.run("r", [5, 6, 7, 8, 9])  # blocks 2, 3 indexed and held, 4 mutable
    assert rig.pool.check_integrity() == ""
    rig.damaged = True
    control = rig.region.control()
    damage(control, rig)
    assert message in rig.pool.check_integrity()
    control.release()


def test_two_blocks_with_one_key(rig: Rig) -> None:
    rig.cache([1, 2])
    rig.cache([3, 4])
    rig.damaged = True
    control = rig.region.control()
    control.set_key(1, control.key(0))
    assert rig.pool.check_integrity() != ""
    control.release()


def test_a_pool_at_work_is_found_whole(rig: Rig) -> None:
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8]):
        rig.cache(tokens)
        rig.pool.evict(1)
        assert rig.pool.check_integrity() == ""


def test_another_process_in_the_middle_of_a_step_is_no_violation(rig: Rig) -> None:
    """What is there at one look and gone at the next was somebody's step; what stays is found."""
    rig.cache([1, 2])
    control = rig.region.control()
    with Region.attach(rig.region.path) as region, Pool.create(region) as other:
        before = control.state[0]
        control.state[0] = words.pack(EVICTING, other.slot, 0)
        assert rig.pool.check_integrity() == ""
        control.state[0] = before
        control.free[0] |= 1
        assert rig.pool.check_integrity() == "block 0 has free bit 1 but is INDEXED, generation 0"
        control.free[0] &= ~1
    control.release()


def test_a_request_that_ends_during_the_look_is_no_violation(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release takes no lock, so another thread's may come at any point of the check."""
    table = rig.pool.table("ends meanwhile")
    assert rig.pool.allocate(table, 2)
    real = integrity._check_parents

    def and_then_it_ends(*arguments: Any) -> str:
        found = real(*arguments)
        if not table.closed:
            table.close()
        return found

    monkeypatch.setattr(integrity, "_check_parents", and_then_it_ends)
    assert rig.pool.check_integrity() == ""
    assert table.closed


def test_a_region_at_rest_is_checked_without_a_process(rig: Rig) -> None:
    rig.cache([1, 2, 3, 4])
    control = rig.region.control()
    assert integrity.check_region(control) == ""
    control.children[0] = 0
    assert integrity.check_region(control) == "block 0 counts 0 children, it has 1"
    control.children[0] = 1
    control.release()
