"""What routers tell each other of bookings: the ladder of a prompt, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from router.booking_event import MAX_RUNGS, BookingEvent, ladder_of
from tests.fakes.speaker import key, packed


@pytest.mark.parametrize(
    ("blocks", "numbers"),
    [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])],
)
def test_a_ladder_has_the_powers_of_two_and_the_end(blocks: int, numbers: list[int]) -> None:
    ladder = ladder_of(packed(range(1, blocks + 1)))
    assert ladder == tuple((number, key(number)) for number in numbers)
    assert BookingEvent("book", "q", "r0", 5, ladder).ladder == ladder


def test_a_ladder_stays_short() -> None:
    assert len(ladder_of(bytes(16 * 100_000))) == 18 <= MAX_RUNGS


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "end"}, "book, start, release"),
        ({"request_id": ""}, "id of its request"),
        ({"request_id": 7}, "id of its request"),
        ({"replica_id": ""}, "at a replica"),
        ({"replica_id": None}, "at a replica"),
        ({"owed_tokens": -1}, "owed_tokens"),
        ({"owed_tokens": 1.0}, "owed_tokens"),
        ({"owed_tokens": True}, "owed_tokens"),
        ({"owed_tokens": 1 << 53}, "owed_tokens"),
        ({"ladder": [(1, key(1))]}, "tuple"),
        ({"ladder": tuple((number, key(1)) for number in range(1, MAX_RUNGS + 2))}, "rungs"),
        ({"ladder": ((1,),)}, "rung is"),
        ({"ladder": ((2, key(1)),)}, "first rung"),
        ({"ladder": ((1, key(1)), (1, key(2)))}, "rise"),
        ({"ladder": ((1, key(1)), (1 << 31, key(2)))}, "rise"),
        ({"ladder": ((1, b"short"),)}, "16 bytes"),
        ({"ladder": ((1, "x" * 16),)}, "16 bytes"),
    ],
)
def test_what_no_booking_has_is_refused(changed: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {"kind": "book", "request_id": "q", "replica_id": "r", "owed_tokens": 1, "ladder": ()}
    BookingEvent(**right)
    with pytest.raises(ValueError, match=words):
        BookingEvent(**right | changed)
