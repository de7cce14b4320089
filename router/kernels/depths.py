"""How many leading keys of a prompt each pool holds, for all pools at once.

What a pool publishes is prefix-closed, so going through the prompt the set of holders only shrinks: where two keys
have equally many holders, they and all between have the same holders. So it is enough to find where the number
changes. Some keys at even distances are looked up; wherever two neighbours differ, the key in the middle, level by
level, until each change is known to the block. The keys of a level do not depend on each other, so their rows are
asked for first and read then: memory answers many questions in the time of one.

Then the last key of each stretch, from the last stretch to the first, tells the pools whose prefix ends there: those
that no later one has.

Limits: a pool that breaks the rule, holding a key without those before it, spoils depths, its own and others', but
nothing else. Its digest says nothing of it; publishers keep the rule by construction.
"""

from __future__ import annotations

from typing import Final

from kvpool.compiled import inner
from kvpool.kernels.atomics import get, highest_bit, lowest_bit, put, put_half
from router.kernels import holders
from router.kernels.context import (
    BITSET,
    COUNT,
    COUNT_MASK,
    HIDDEN,
    HOLDERS,
    LIVE,
    ROW_BYTES,
    ROWS,
    SET_WORDS,
    TABLE,
    USED,
)
from router.kernels.rows import ask_for, find, home_of, place_of, scrambled
from router.kernels.words import get_short, prefetch

GRID: Final = 16
"""How many keys are looked up first."""
SCRATCH: Final = 5
"""Words of scratch for each key."""
SCRATCH_MORE: Final = 16
"""Words of scratch beyond those and the words of a set."""


@inner
def _look_up(ctx: int, keys: int, wave: int, number: int, counts: int, rows: int) -> None:
    """Writes, for the `number` keys whose positions are at `wave`, their row and how many live holders it has.

    The row of a key that nobody holds is the table's last one, which is empty.
    """
    nobody = get(ctx + TABLE) + (get(ctx + ROWS) - 1) * ROW_BYTES
    for at in range(wave, wave + 8 * number, 8):
        position = get(at)
        key = keys + 16 * position
        home = home_of(ctx, place_of(scrambled(get(key), get(key + 8))))
        put(rows + 8 * position, home)
        ask_for(home)
    hidden = get(ctx + HIDDEN) != 0
    for at in range(wave, wave + 8 * number, 8):
        position = get(at)
        key = keys + 16 * position
        second = get(key + 8)
        row = find(get(rows + 8 * position), scrambled(get(key), second), second)
        row += nobody * int(row == 0)
        put(rows + 8 * position, row)
        count = get_short(row + COUNT)
        put(counts + 8 * position, count & COUNT_MASK)
        if hidden and count & BITSET != 0:
            prefetch(holders.set_of(ctx, row))
    if hidden:
        for at in range(wave, wave + 8 * number, 8):
            position = get(at)
            put(counts + 8 * position, holders.live(ctx, get(rows + 8 * position)))


@inner
def _note(low: int, high: int, counts: int, queue: int, number: int, ends: int) -> int:
    """Puts the stretch from `low` to `high` into the queue of `number` stretches if the holders change in it; its
    length then.

    Or, if they change right after `low`, marks that. Nobody can foresee which it is, so there is no branch.
    """
    change = int(get(counts + 8 * low) != get(counts + 8 * high))
    last = int(high - low == 1)
    word = ends + (low >> 6) * 8
    put(word, get(word) | (change & last) << (low & 63))
    put(queue + 8 * number, high << 32 | low)
    return number + (change & (1 - last))


@inner
def _give(ctx: int, row: int, depth: int, given: int, out: int) -> None:
    """Gives `depth` to the live holders of the row's key that have none yet."""
    seen = get(ctx + LIVE)
    count = get_short(row + COUNT)
    if count & BITSET == 0:
        for at in range(row + HOLDERS, row + HOLDERS + 2 * count, 2):
            bit = get_short(at)
            if holders.has_bit(seen, bit) and not holders.has_bit(given, bit):
                holders.flip_bit(given, bit)
                put_half(out + 4 * bit + 4, depth)
        return
    words = holders.set_of(ctx, row)
    for index in range(get(ctx + SET_WORDS)):
        known = get(given + 8 * index)
        fresh = get(words + 8 * index) & get(seen + 8 * index) & ~known
        if fresh == 0:
            continue
        put(given + 8 * index, known | fresh)
        while fresh != 0:
            put_half(out + 4 * (64 * index + lowest_bit(fresh)) + 4, depth)
            fresh &= fresh - 1


@inner
def depths(ctx: int, keys: int, number: int, out: int, scratch: int) -> int:
    """Writes the depth of each slot, in blocks, to `out`: int32, the slot as index; how many words of 64 slots there are.

    `out` has room for one more than there are slots, `scratch` for SCRATCH words a key, and SCRATCH_MORE and the
    words of a set beyond.
    """
    set_words = get(ctx + SET_WORDS)
    for at in range(out, out + 4 + 256 * set_words, 4):
        put_half(at, 0)
    if number == 0 or get(ctx + USED) == 0:
        return set_words
    counts = scratch
    rows = counts + 8 * (number + 1)
    wave = rows + 8 * number
    queue = wave + 8 * number
    later = queue + 8 * (number // 2 + 2)  # a level has at most half as many stretches as there are keys
    ends = later + 8 * (number // 2 + 2)
    given = ends + 8 * (number // 64 + 1)
    for at in range(ends, given + 8 * set_words, 8):
        put(at, 0)
    grid = min(GRID, number)
    for step in range(grid):
        put(wave + 8 * step, step * number // grid)
    _look_up(ctx, keys, wave, grid, counts, rows)
    put(counts + 8 * number, 0)
    stretches = 0
    for step in range(grid):
        stretches = _note(step * number // grid, (step + 1) * number // grid, counts, queue, stretches, ends)
    while stretches != 0:
        for index in range(stretches):
            stretch = get(queue + 8 * index)
            put(wave + 8 * index, (stretch >> 32) + (stretch & 0xFFFFFFFF) >> 1)
        _look_up(ctx, keys, wave, stretches, counts, rows)
        found = 0
        for index in range(stretches):
            stretch = get(queue + 8 * index)
            low, high = stretch & 0xFFFFFFFF, stretch >> 32
            middle = low + high >> 1
            found = _note(low, middle, counts, later, found, ends)
            found = _note(middle, high, counts, later, found, ends)
        stretches = found
        queue, later = later, queue
    for index in range(number // 64 + 1):
        word = get(ends + 8 * index)
        while word != 0:
            row = get(rows + 8 * (64 * index + lowest_bit(word)))
            if get_short(row + COUNT) & BITSET != 0:
                prefetch(holders.set_of(ctx, row))
            word &= word - 1
    for index in range(number // 64, -1, -1):
        word = get(ends + 8 * index)
        while word != 0:
            highest = highest_bit(word)
            word ^= 1 << highest
            position = 64 * index + highest
            _give(ctx, get(rows + 8 * position), position + 1, given, out)
    return set_words
