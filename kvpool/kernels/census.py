"""Counting blocks by condition in one pass: each block is looked at once, so the conditions sum to the capacity."""

from __future__ import annotations

from typing import Final

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, load, put
from kvpool.kernels.context import CAPACITY, HOLDERS, STATE
from kvpool.words import FREE, LOCAL, MUTABLE, SEALED, STATE_MASK

CONDITIONS: Final = ("free", "local", "mutable", "sealed", "held", "cached")
"""In the order in which `census` counts them."""


@inner
def census(ctx: int, out: int) -> int:
    """Writes six counts to `out`, in the order of CONDITIONS; 0. A word that is no state counts as cached."""
    for place in range(6):
        put(out + 8 * place, 0)
    for block in range(get(ctx + CAPACITY)):
        state = load(get(ctx + STATE) + 8 * block) & STATE_MASK
        if state == FREE:
            place = 0
        elif state == LOCAL:
            place = 1
        elif state == MUTABLE:
            place = 2
        elif state == SEALED:
            place = 3
        elif load(get(ctx + HOLDERS) + 8 * block) != 0:
            place = 4
        else:
            place = 5
        put(out + 8 * place, get(out + 8 * place) + 1)
    return 0
