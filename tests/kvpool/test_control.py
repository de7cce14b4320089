from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool.words import FREE, NO_SLOT, pack

if TYPE_CHECKING:
    from tests.kvpool.conftest import MakeRig, Rig


def test_views_and_arrays_share_memory(rig: Rig) -> None:
    control = rig.region.control()
    control.last_use[3] = 77
    assert control.array("last_use").tolist()[3] == 77
    control.array("children")[2] = 5
    assert control.children[2] == 5
    control.array("children")[2] = 0
    control.release()


def test_fresh_blocks_are_free_with_their_bits_set(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_blocks=70)
    control = rig.region.control()
    assert set(control.state) == {pack(FREE, NO_SLOT, 0)}
    assert list(control.free) == [2**64 - 1, 2**6 - 1]
    control.release()


def test_keys_and_tokens_of_neighbours_do_not_touch(rig: Rig) -> None:
    control = rig.region.control()
    for block in range(8):
        control.set_key(block, bytes([block]) * 16)
        control.set_tokens(block, bytes([block + 100]) * 8)
    for block in range(8):
        assert control.key(block) == bytes([block]) * 16
        assert control.tokens(block) == bytes([block + 100]) * 8
    assert control.array("key").shape == (8, 2)
    control.release()


def test_release_is_repeatable_and_final(rig: Rig) -> None:
    control = rig.region.control()
    control.release()
    control.release()
    with pytest.raises(ValueError, match="released"):
        control.state[0]
