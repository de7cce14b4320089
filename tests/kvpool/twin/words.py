"""The state of a block, spelled out: what it may become, who owns it, which life it lives.

    FREE      in nobody's hands
    LOCAL     parked in the local cache of its owner
    MUTABLE   being filled by its owner
    SEALED    complete, its owner's alone, not in the index
    INDEXED   matchable; whoever holds it has a bit in its holder word
    EVICTING  its owner wants it, holders may still object
    FREEING   past the point of no return

The generation rises on every way into FREE or LOCAL except between those two, so a block's next life is told from this
one. Written without a look at the product's own words, on purpose: the two must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

NOBODY: Final = -1


class State(Enum):
    """The seven states."""

    FREE = "free"
    LOCAL = "local"
    MUTABLE = "mutable"
    SEALED = "sealed"
    INDEXED = "indexed"
    EVICTING = "evicting"
    FREEING = "freeing"


_MAY_BECOME: Final = {
    State.FREE: {State.LOCAL, State.MUTABLE},
    State.LOCAL: {State.MUTABLE, State.FREE},
    State.MUTABLE: {State.SEALED, State.LOCAL, State.FREE},
    State.SEALED: {State.INDEXED, State.LOCAL, State.FREE},
    State.INDEXED: {State.EVICTING},
    State.EVICTING: {State.INDEXED, State.FREEING},
    State.FREEING: {State.FREE},
}
_OWNED: Final = {State.LOCAL, State.MUTABLE, State.SEALED, State.EVICTING, State.FREEING}


@dataclass(frozen=True, slots=True)
class Word:
    """One state word. `owner` is a process slot or NOBODY."""

    state: State = State.FREE
    owner: int = NOBODY
    generation: int = 0

    def to(self, state: State, owner: int = NOBODY) -> Word:
        """Returns the word after this step. Raises AssertionError when a block may not take it."""
        assert state in _MAY_BECOME[self.state], f"illegal step of a block: {self} -> {state}"
        assert (owner != NOBODY) == (state in _OWNED), f"a block that is {state} cannot belong to slot {owner}"
        ends = state in (State.FREE, State.LOCAL) and self.state not in (State.FREE, State.LOCAL)
        return Word(state, owner, self.generation + ends)
