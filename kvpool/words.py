"""The state of a block, and the one 64-bit word it lives in.

    bits  0..7   state
    bits  8..15  owner slot + 1 (0: nobody)
    bits 16..62  generation; bit 63 stays clear so that the word is the same signed and unsigned

    FREE      in nobody's hands; the bitmap of free blocks hints at it
    LOCAL     parked in the local cache of its owner slot
    MUTABLE   being filled by its owner slot
    SEALED    complete and immutable, but not in the index
    INDEXED   sealed and matchable; the only state that several requests may share
    EVICTING  its owner slot wants it; anyone may still object by holding it, and it goes back to INDEXED
    FREEING   past the point of no return: about to leave the index, for FREE or straight into its owner's hands

Whatever was known about a block dies with its generation: it rises whenever a block's content is given up, that is on
every way into FREE, and on every way into LOCAL or MUTABLE except the ones from FREE and LOCAL. A reader that remembers
(block, generation) can tell a block from its next life.

Limits: 255 owners (64 used), 2^47 generations (at a million reuses of one block a second, four years).
"""

from __future__ import annotations

from typing import Final

FREE: Final = 1
LOCAL: Final = 2
MUTABLE: Final = 3
SEALED: Final = 4
INDEXED: Final = 5
EVICTING: Final = 6
FREEING: Final = 7

STATE_NAMES: Final[dict[int, str]] = {
    FREE: "FREE",
    LOCAL: "LOCAL",
    MUTABLE: "MUTABLE",
    SEALED: "SEALED",
    INDEXED: "INDEXED",
    EVICTING: "EVICTING",
    FREEING: "FREEING",
}
"""The states by number. The numbers are part of a region's layout; 0 is no state, so zeroed memory is recognisable."""

NO_SLOT: Final = -1
"""The owner of a block that nobody owns."""

STATE_MASK: Final = 0xFF
OWNER_SHIFT: Final = 8
GENERATION_SHIFT: Final = 16
GENERATION_MASK: Final = (1 << 47) - 1

LEGAL: Final[dict[int, frozenset[int]]] = {
    FREE: frozenset({LOCAL, MUTABLE}),
    LOCAL: frozenset({MUTABLE, FREE}),
    MUTABLE: frozenset({SEALED, LOCAL, FREE}),
    SEALED: frozenset({INDEXED, LOCAL, FREE}),
    INDEXED: frozenset({EVICTING}),
    EVICTING: frozenset({INDEXED, FREEING}),
    FREEING: frozenset({FREE, MUTABLE}),
}
"""Which state may follow which. Everything else is a bug of ours."""

_BUMPS: Final = frozenset(
    (before, after)
    for before, allowed in LEGAL.items()
    for after in allowed & {FREE, LOCAL, MUTABLE}
    if before != FREE and (before, after) != (LOCAL, MUTABLE)
)
DEPTH_SHIFT: Final = 32
PARENT_MASK: Final = 0xFFFFFFFF
"""Of a parent word: its depth above, parent block + 1 below."""

# (before << 8 | after) -> what to add to the generation field; a missing pair is illegal.
_STEP: Final[dict[int, int]] = {
    before << 8 | after: (1 if (before, after) in _BUMPS else 0)
    for before, allowed in LEGAL.items()
    for after in allowed
}


def pack(state: int, slot: int, generation: int) -> int:
    """Returns the state word. `slot` is the owner (0..63) or NO_SLOT; `generation` wraps at 2^47."""
    return (generation & GENERATION_MASK) << GENERATION_SHIFT | (slot + 1) << OWNER_SHIFT | state


def state_of(word: int) -> int:
    """Returns the state in `word`."""
    return word & STATE_MASK


def owner_of(word: int) -> int:
    """Returns the owner slot in `word`, or NO_SLOT."""
    return (word >> OWNER_SHIFT & 0xFF) - 1


def generation_of(word: int) -> int:
    """Returns the generation in `word`."""
    return word >> GENERATION_SHIFT & GENERATION_MASK


def moved(word: int, state: int, slot: int) -> int:
    """Returns the word that follows `word` when its block goes to `state` and belongs to `slot` (or NO_SLOT).

    Raises AssertionError when the step is not in LEGAL.
    """
    step = _STEP.get((word & STATE_MASK) << 8 | state)
    assert step is not None, f"illegal step of a block: {describe(word)} -> {STATE_NAMES.get(state, state)}"
    generation = (word >> GENERATION_SHIFT) + step & GENERATION_MASK
    return generation << GENERATION_SHIFT | (slot + 1) << OWNER_SHIFT | state


def describe(word: int) -> str:
    """Returns the word in words, also when it is damaged."""
    name = STATE_NAMES.get(word & STATE_MASK, f"state {word & STATE_MASK}?")
    owner = owner_of(word)
    return f"{name}, generation {generation_of(word)}" + ("" if owner == NO_SLOT else f", owner slot {owner}")
