"""Applying a batch: keys that a pool has no longer, keys that it has now, and the digest of its set after them.

The row of a key is anywhere in memory, so what takes time is waiting for it; therefore rows are asked for some keys ahead.
"""

from __future__ import annotations

from typing import Final

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, put
from kvpool.kernels.key_digest import mixed
from router.kernels import holders
from router.kernels.context import HELD, UNEXPECTED
from router.kernels.rows import ask_for, erase, find, home_of, insert, is_empty, place_of, scrambled

AHEAD: Final = 12
"""How many keys ahead a row is asked for."""


@inner
def _ask(ctx: int, keys: int, number: int, position: int) -> None:
    """Begins to fetch the row of the key AHEAD after `position`.

    Not its set: to know whether it has one, the row would have to be looked for twice, which costs more than some sets.
    """
    ahead = position + AHEAD
    if ahead < number:  # it is not below 0: positions begin at -AHEAD
        key = keys + 16 * ahead
        ask_for(home_of(ctx, place_of(scrambled(get(key), get(key + 8)))))


@inner
def change(ctx: int, bit: int, removed: int, gone: int, added: int, come: int, digest: int) -> int:
    """Takes `gone` keys at `removed` from a slot and gives it `come` keys at `added`; the digest, which was `digest`, after it.

    There is room for the new rows and sets. UNEXPECTED: how many keys were not as they should be (they change nothing).
    """
    unexpected, changes = 0, 0
    for position in range(-AHEAD, gone):
        _ask(ctx, removed, gone, position)
        if position < 0:
            continue
        first, second = get(removed + 16 * position), get(removed + 16 * position + 8)
        digest -= mixed(first, second)
        word = scrambled(first, second)
        row = find(home_of(ctx, place_of(word)), word, second)
        if row == 0 or not holders.remove(ctx, row, bit):
            unexpected += 1
            continue
        changes -= 1
        if is_empty(row):
            erase(ctx, row)
    for position in range(-AHEAD, come):
        _ask(ctx, added, come, position)
        if position < 0:
            continue
        first, second = get(added + 16 * position), get(added + 16 * position + 8)
        digest += mixed(first, second)
        word = scrambled(first, second)
        home = home_of(ctx, place_of(word))
        row = find(home, word, second)
        if row == 0:
            row = insert(ctx, home, word, second)
        if row == 0 or not holders.add(ctx, row, bit):
            unexpected += 1
            continue
        changes += 1
    held = get(ctx + HELD) + 8 * bit
    put(held, get(held) + changes)
    put(ctx + UNEXPECTED, unexpected)
    return digest
