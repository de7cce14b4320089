"""What the entries of one table work on: a record of addresses and numbers, and its fields' offsets.

Rows. 32 bytes each: two words that are the key (`rows.py`), then eight 16-bit words. The first of these is how many
pools hold the key, 0 for an empty row; the others are the holders, while there are no more than seven, in no order.
For more holders BITSET is added to the number, and the last word is the number of a row of the sets: one bit for each
pool slot.

Slots. A pool's slot is a number from 1 on; its bit is one less. A slot whose bit in LIVE is 0 is hidden: a look-up
passes over it wherever it stands. HIDDEN counts those that may stand in rows all the same.
"""

from __future__ import annotations

from typing import Final

(
    TABLE,  # address of the rows
    CAPACITY,  # how many homes there are
    ROWS,  # how many rows: more than homes, so that a crowd at the end has where to go; the last is always empty
    USED,
    SETS,  # address of the sets
    SET_WORDS,  # words of a set: there are 64 times as many slots
    SETS_ROOM,
    SETS_MADE,  # how many were ever used: those beyond are not in the list of free ones
    SETS_FREE,  # the first free one, whose first word is the next one's number; NONE: none
    SETS_USED,
    LIVE,  # address of a set: the slots that look-ups see
    DEAD,  # address of a set: the slots that `walking.clean` takes out
    HELD,  # address of an int64 for each bit: how many keys have it
    HIDDEN,
    UNEXPECTED,  # result of `changing.change`: keys that were in already, or were not in
    _END,
) = range(0, 8 * 16, 8)
CONTEXT_WORDS: Final = _END // 8

ROW_BYTES: Final = 32
COUNT: Final = 16
"""Byte offset, in a row, of the 16-bit word with the number of holders."""
HOLDERS: Final = 18
INLINE: Final = 7
"""How many holders a row has room for."""
FEW: Final = 5
"""With so many left, holders come back from a set into the row: fewer than INLINE, so that one pool cannot make it flutter."""
SET: Final = 24
"""Byte offset, in a row, of the number of its set."""
BITSET: Final = 1 << 15
COUNT_MASK: Final = BITSET - 1
MAX_SLOTS: Final = 16384
NONE: Final = -1
END: Final = 1 << 32
"""A place beyond all (`rows.place_of`)."""
