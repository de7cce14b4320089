from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvpool import SlotLoad, history
from kvpool import slot as process_slot
from kvpool.control import Control

if TYPE_CHECKING:
    from tests.kvpool.conftest import Rig


@pytest.fixture
def control(rig: Rig) -> Iterator[Control]:
    window = rig.region.control()
    yield window
    window.release()


def test_the_last_four_events_newest_first(rig: Rig, control: Control) -> None:
    for number, event in enumerate(history.EVENTS, 1):
        history.note(control, 2, event, rig.pool.slot, number * 10_000)
    history.note(control, 2, history.TAKEN, rig.pool.slot, 5_000_000_010_000)
    found = history.events(control, 2)
    assert [event.what for event in found] == ["taken", "reclaimed", "given back", "sealed"]
    assert [event.at_s for event in found] == pytest.approx([5000.00001, 0.00004, 0.00003, 0.00002])
    assert history.events(control, 1) == history.events(control, 3) == []


def test_a_process_is_named_while_it_has_the_slot(rig: Rig, control: Control) -> None:
    rig.pool.report_load(SlotLoad("replica-1", 0, 0, 0, 0.0))
    history.note(control, 0, history.SEALED, rig.pool.slot, 0)
    (event,) = history.events(control, 0)
    assert (event.pid, event.replica_id) == (os.getpid(), "replica-1")
    assert event.describe() == f"sealed by process {os.getpid()} (replica-1) in slot {rig.pool.slot} at 0.00000 s"
    life = process_slot.word(control, rig.pool.slot, "generation")
    process_slot.set_word(control, rig.pool.slot, "generation", life + 1)
    (event,) = history.events(control, 0)
    assert (event.pid, event.replica_id) == (0, "")
    assert "whose process has left" in event.describe()


@pytest.mark.parametrize("slot", [-1, 64, 200])
def test_a_slot_that_cannot_be_has_no_process(control: Control, slot: int) -> None:
    assert history.process_in(control, slot) == (0, "")


@pytest.mark.parametrize("word", [0, 9 << 60, 1 << 60 | 127 << 53, (1 << 64) - 1])
def test_any_word_can_be_read(control: Control, word: int) -> None:
    control.history[0] = word
    assert len(history.events(control, 0)) == (1 if word >> 60 == 1 else 0)
