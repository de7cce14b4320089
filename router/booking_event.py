"""What one router tells the others of a booking: that it was made, that its first token has come, that it has ended.

A prompt is named by a ladder: its keys after 1, 2, 4, 8, ... blocks, and the last one. Keys are chained, so whoever holds the
longer prompt finds with a few comparisons how far the two go together: at least to the highest rung that agrees, less than the
first that does not. So a booking of a prompt of any length is a few hundred bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from kvpool.keys import KEY_BYTES

BookingKind = Literal["book", "start", "release"]
KINDS: Final[tuple[BookingKind, ...]] = get_args(BookingKind)

Ladder = tuple[tuple[int, bytes], ...]
"""(number of blocks, key of the last of them), numbers rising."""

MAX_RUNGS: Final = 32
"""A ladder that doubles reaches 2^30 blocks with 31 rungs and the last one."""


@dataclass(frozen=True, slots=True)
class BookingEvent:
    """One change of one booking.

    `owed_tokens`: prompt tokens that the replica has yet to compute for it. Only "book" says the replica, the tokens and the
    ladder; it takes the place of an earlier booking of the request. "start": no prompt tokens are owed any more. Construction
    raises ValueError for values that no booking has, so that what comes from elsewhere is checked once.
    """

    kind: BookingKind
    request_id: str
    replica_id: str = ""
    owed_tokens: int = 0
    ladder: Ladder = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a booking is told by {', '.join(KINDS)}, got {self.kind!r:.40}")
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError(f"a booking has the id of its request, got {self.request_id!r:.60}")
        if not isinstance(self.replica_id, str) or (self.kind == "book" and not self.replica_id):
            raise ValueError(f"a booking is at a replica, got {self.replica_id!r:.60}")
        if type(self.owed_tokens) is not int or not 0 <= self.owed_tokens < 1 << 53:
            raise ValueError(f"owed_tokens is an integer in 0..2^53-1, got {self.owed_tokens!r:.40}")
        _check(self.ladder)


def ladder_of(keys: bytes) -> Ladder:
    """Returns the ladder of a prompt with these packed keys (16 bytes each); empty for no keys."""
    blocks = len(keys) // KEY_BYTES
    numbers = [1 << power for power in range(blocks.bit_length())]
    if blocks and numbers[-1] != blocks:
        numbers.append(blocks)
    return tuple((number, keys[(number - 1) * KEY_BYTES : number * KEY_BYTES]) for number in numbers)


def _check(ladder: Ladder) -> None:
    if not isinstance(ladder, tuple) or len(ladder) > MAX_RUNGS:
        raise ValueError(f"a ladder is a tuple of up to {MAX_RUNGS} rungs, got {ladder!r:.60}")
    below = 0
    for rung in ladder:
        if not isinstance(rung, tuple) or len(rung) != 2:
            raise ValueError(f"a rung is (blocks, key), got {rung!r:.60}")
        blocks, key = rung
        if type(blocks) is not int or not below < blocks < 1 << 31:
            raise ValueError(f"the rungs of a ladder rise from 1, got {blocks!r:.40} after {below}")
        if type(key) is not bytes or len(key) != KEY_BYTES:
            raise ValueError(f"a rung has a key of {KEY_BYTES} bytes, got {key!r:.60}")
        if not below and blocks != 1:
            raise ValueError(f"the first rung of a ladder is that of the first block, got {blocks}")
        below = blocks
