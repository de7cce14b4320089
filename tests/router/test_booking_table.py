"""The columns behind bookings: growth, rows without gaps, and numbers of replicas that come and go."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from router import booking_table
from router.booking_table import Booking, BookingTable, Roll, reported
from tests.fakes.speaker import packed


def booking(number: int, replica_id: str) -> Booking:
    """It owes `number` tokens; its prompt has the keys number and 7."""
    return Booking(f"q{number}", replica_id, number, number, packed([number, 7]), 1.0, blocks=2)


def sums(table: BookingTable, roll: Roll) -> list[tuple[int, int]]:
    since = np.full(len(roll.replica_ids), -math.inf)
    _, tokens, requests = table.survey(roll, since, b"", np.zeros(len(since), np.int64))
    return list(zip(tokens.tolist(), requests.tolist(), strict=True))


def test_rows_have_no_gaps_however_they_come_and_go() -> None:
    table, rng = BookingTable(), random.Random(3)
    alive: list[Booking] = []
    names = [f"r{number}" for number in range(20)]
    for step in range(3000):
        if rng.random() < (0.7 if step < 1500 else 0.3) or not alive:
            alive.append(booking(step, rng.choice(names)))
            table.add(alive[-1])
        else:
            table.remove(alive.pop(rng.randrange(len(alive))))
        if step % 100 == 0:
            assert [one.row for one in table.bookings] == list(range(len(alive)))
            wanted = [[one.owed_tokens for one in alive if one.replica_id == name] for name in names]
            assert sums(table, Roll(names)) == [(sum(owed), len(owed)) for owed in wanted]
    assert len(alive) < 500
    keys = packed([alive[0].uncached_tokens, 7, 8])
    blocks, _, _ = table.survey(Roll([alive[0].replica_id]), np.zeros(1), keys, np.zeros(1, np.int64))
    assert blocks.tolist() == [2]


def test_only_those_asked_about_are_answered() -> None:
    table = BookingTable()
    for number, name in enumerate(("a", "b", "a", "c")):
        table.add(booking(1 << number, name))
    assert sums(table, Roll(["c", "unheard", "a"])) == [(8, 1), (0, 0), (5, 2)]
    assert sums(table, Roll([])) == []
    assert sums(table, Roll(["b"])) == [(2, 1)]


def test_what_a_booking_owes_and_when_it_was_accepted_may_change() -> None:
    table, one, roll = BookingTable(), booking(40, "a"), Roll(["a"])
    table.add(one)
    for accepted_at, since, wanted in ((math.inf, 1e9, 1), (5.0, 5.0, 0), (5.0, 4.9, 1), (0.0, -0.1, 1), (0.0, 0.0, 0)):
        one.accepted_at = accepted_at
        table.note(one)
        _, _, requests = table.survey(roll, np.array([since]), b"", np.zeros(1, np.int64))
        assert requests.tolist() == [wanted]
    one.started_at = 6.0
    table.note(one)
    assert sums(table, roll) == [(0, 1)]
    one.ended_at = 7.0
    table.note(one)
    assert sums(table, roll) == [(0, 0)]


def test_numbers_of_replicas_that_are_gone_are_taken_back() -> None:
    table = BookingTable()
    kept = booking(5, "kept")
    table.add(booking(1, "first"))
    table.add(kept)
    roll = Roll(["kept", "first"])
    assert sums(table, roll) == [(5, 1), (1, 1)]
    many = [f"r{number}" for number in range(2 * booking_table._SPARE_REPLICAS)]
    assert sums(table, Roll(many)) == [(0, 0)] * len(many)
    table.remove(table.bookings[0])
    table.tidy()
    assert table.generation == 1
    assert sums(table, roll) == [(5, 1), (0, 0)]  # looked up anew
    assert roll.generation == 1
    table.tidy()
    assert table.generation == 1


def test_what_a_decision_sees_is_reports_depths_and_bookings_together() -> None:
    """The same as if each were asked for, with pools that have no slot, and a mirror that has fewer of them."""
    table, rng = BookingTable(), random.Random(7)
    names = tuple(f"r{number}" for number in range(9))
    for number in range(60):
        one = booking(number, rng.choice(names))
        one.accepted_at = rng.choice([math.inf, 1.0, 3.0])
        table.add(one)
        asked = one.packed + packed([8, 9])
    roll = Roll(names)
    slots = np.array([0, 5, 2, 99, 2, 1, 3, -1, 4], np.int64)
    depths = np.array([0, 1, 4, 2, 9, 0], np.int32)
    words = np.array([[rng.randrange(100) for _ in names] for _ in range(8)], np.int64)
    since = np.full(len(names), 2.0)
    words[2] = words[7] = since.view(np.int64)  # nothing is in doubt
    listed = np.array([depths[slot] if 0 <= slot < len(depths) else 0 for slot in slots], np.int64)
    blocks, tokens, requests = table.survey(roll, since, asked, np.minimum(listed, 4))
    cached, queued, running, listed_tokens, waiting = table.see(
        reported(roll, slots, slots.ctypes.data, words), depths, asked, 16, 70
    )
    assert cached.tolist() == np.minimum(np.maximum(blocks, listed) * 16, 70).tolist()
    assert queued.tolist() == (words[0] + tokens).tolist()
    assert (running + waiting).tolist() == (words[1] + words[3] + requests).tolist()
    owing = [one for one in table.bookings if one.owed_tokens and one.accepted_at > 2.0]
    assert (waiting - words[3]).tolist() == [sum(one.replica_id == name for one in owing) for name in names]
    assert listed_tokens.tolist() == np.minimum(listed * 16, 70).tolist()
    assert len(set(cached.tolist())) > 3


def test_what_a_report_may_contain_already_is_not_counted_twice() -> None:
    table, names = BookingTable(), ("r0", "r1")
    owed = 40
    for replica_id in names:
        one = booking(owed, replica_id)
        one.accepted_at = 2.5
        table.add(one)
    roll, slots = Roll(names), np.zeros(2, np.int64)
    words = np.zeros((8, 2), np.int64)
    words[0], words[3] = [owed, 0], [1, 0]  # r0 tells of the request already, r1 does not yet
    words[2], words[7] = np.full(2, 2.4).view(np.int64), np.full(2, 2.5).view(np.int64)
    seen = table.see(reported(roll, slots, slots.ctypes.data, words), np.zeros(1, np.int32), b"", 16, 70)
    assert (seen[1].tolist(), seen[4].tolist()) == ([owed, owed], [1, 1])
    words = words.copy()
    words[7] = np.full(2, 2.45).view(np.int64)  # accepted after both reports
    seen = table.see(reported(roll, slots, slots.ctypes.data, words), np.zeros(1, np.int32), b"", 16, 70)
    assert (seen[1].tolist(), seen[4].tolist()) == ([2 * owed, owed], [2, 1])


@pytest.mark.parametrize(
    ("accepted_at", "started_at", "ended_at", "wanted"),
    [
        (1.0, 1.5, 2.6, (40, 0, 1)),  # decoded at the time of the report, and is over
        (2.45, 2.5, 2.6, (40, 0, 1)),
        (1.0, 2.55, 2.6, (20, 1, 0)),  # owed its 20 tokens then
        (2.45, 2.55, 2.6, (20, 1, 0)),
        (1.0, 1.5, 2.5, (40, 1, 1)),  # over before the report: that cannot contain it
        (2.55, 2.56, 2.6, (40, 1, 1)),  # accepted after it
    ],
)
def test_what_ended_after_a_report_is_taken_off_it(
    accepted_at: float, started_at: float, ended_at: float, wanted: tuple[int, int, int]
) -> None:
    """`wanted`: tokens queued, requests that run and that wait, of a report that tells of 40, 1 and 1."""
    table = BookingTable()
    one = booking(20, "r0")
    one.accepted_at, one.started_at, one.ended_at = accepted_at, started_at, ended_at
    table.add(one)
    slots, words = np.zeros(1, np.int64), np.array([[40], [1], [0], [1], [0], [0], [0], [0]], np.int64)
    words[2], words[7] = np.array([2.4]).view(np.int64), np.array([2.5]).view(np.int64)
    seen = table.see(reported(Roll(("r0",)), slots, slots.ctypes.data, words), np.zeros(1, np.int32), b"", 16, 70)
    assert (int(seen[1][0]), int(seen[2][0]), int(seen[4][0])) == wanted


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1), (3, 0), (2, 2)])
def test_whose_prompt_was_being_computed_is_taken_off_what_runs(running: int, waiting: int) -> None:
    """A report says of a request whose prompt is in hand that it runs, long before its first token is here."""
    table = BookingTable()
    one = booking(20, "r0")
    one.accepted_at, one.started_at, one.ended_at = 2.0, 2.55, 2.6
    table.add(one)
    slots, words = np.zeros(1, np.int64), np.array([[5], [running], [0], [waiting], [0], [0], [0], [0]], np.int64)
    words[2], words[7] = np.array([2.4]).view(np.int64), np.array([2.5]).view(np.int64)
    seen = table.see(reported(Roll(("r0",)), slots, slots.ctypes.data, words), np.zeros(1, np.int32), b"", 16, 70)
    assert (int(seen[1][0]), int(seen[2][0] + seen[4][0])) == (0, running + waiting - 1)


def test_nothing_is_taken_off_twice() -> None:
    """Three that ended, two that go on, and a report that tells of fewer: never below none, nor below what goes on."""
    table = BookingTable()
    for number in range(5):
        one = booking(20 + number, "r0")
        one.accepted_at = 2.45
        if number < 3:
            one.started_at, one.ended_at = 2.47, 2.6
        elif number == 3:
            one.started_at = 2.48
        table.add(one)
    slots, words = np.zeros(1, np.int64), np.array([[10], [2], [0], [0], [0], [0], [0], [0]], np.int64)
    words[2], words[7] = np.array([2.4]).view(np.int64), np.array([2.5]).view(np.int64)
    seen = table.see(reported(Roll(("r0",)), slots, slots.ctypes.data, words), np.zeros(1, np.int32), b"", 16, 70)
    assert (int(seen[1][0]), int(seen[2][0]), int(seen[4][0])) == (24, 1, 1)
