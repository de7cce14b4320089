"""The pools that hold a key: up to seven in its row, more as a set of bits elsewhere (`context.py` has the layout)."""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import count_bits, get, lowest_bit, put
from router.kernels.context import (
    BITSET,
    COUNT,
    COUNT_MASK,
    FEW,
    HOLDERS,
    INLINE,
    LIVE,
    NONE,
    SET,
    SET_WORDS,
    SETS,
    SETS_FREE,
    SETS_MADE,
    SETS_USED,
)
from router.kernels.words import get_short, put_short


@inner
def set_of(ctx: int, row: int) -> int:
    """The address of the set of a row that has one."""
    return get(ctx + SETS) + get(row + SET) * get(ctx + SET_WORDS) * 8


@inner
def has_bit(words: int, bit: int) -> bool:
    """Whether a bit of the set at `words` is 1."""
    return get(words + (bit >> 6) * 8) >> (bit & 63) & 1 != 0


@inner
def flip_bit(words: int, bit: int) -> None:
    """Turns a bit of the set at `words` over."""
    at = words + (bit >> 6) * 8
    put(at, get(at) ^ 1 << (bit & 63))


@inner
def _take_set(ctx: int) -> int:
    """The number of a set without bits. There is one: the caller's caller has made room."""
    number = get(ctx + SETS_FREE)
    size = get(ctx + SET_WORDS) * 8
    if number == NONE:
        number = get(ctx + SETS_MADE)
        put(ctx + SETS_MADE, number + 1)
    else:
        put(ctx + SETS_FREE, get(get(ctx + SETS) + number * size))
    start = get(ctx + SETS) + number * size
    for at in range(start, start + size, 8):
        put(at, 0)
    put(ctx + SETS_USED, get(ctx + SETS_USED) + 1)
    return number


@inner
def _give_set(ctx: int, number: int) -> None:
    put(get(ctx + SETS) + number * get(ctx + SET_WORDS) * 8, get(ctx + SETS_FREE))
    put(ctx + SETS_FREE, number)
    put(ctx + SETS_USED, get(ctx + SETS_USED) - 1)


@inner
def add(ctx: int, row: int, bit: int) -> bool:
    """Makes a slot a holder of the row's key; False when it is one."""
    count = get_short(row + COUNT)
    if count & BITSET == 0:
        for at in range(row + HOLDERS, row + HOLDERS + 2 * count, 2):
            if get_short(at) == bit:
                return False
        if count < INLINE:
            put_short(row + HOLDERS + 2 * count, bit)
            put_short(row + COUNT, count + 1)
            return True
        _spill(ctx, row)
        count |= BITSET
    words = set_of(ctx, row)
    if has_bit(words, bit):
        return False
    flip_bit(words, bit)
    put_short(row + COUNT, count + 1)
    return True


@inner
def remove(ctx: int, row: int, bit: int) -> bool:
    """Makes a slot no holder of the row's key; False when it is none. The row may be empty then: `rows.erase` it."""
    count = get_short(row + COUNT)
    if count & BITSET != 0:
        words = set_of(ctx, row)
        if not has_bit(words, bit):
            return False
        flip_bit(words, bit)
        put_short(row + COUNT, count - 1)
        if count & COUNT_MASK <= FEW + 1:
            collect(ctx, row)
        return True
    last = row + HOLDERS + 2 * (count - 1)
    for at in range(row + HOLDERS, last + 2, 2):
        if get_short(at) == bit:
            put_short(at, get_short(last))
            put_short(row + COUNT, count - 1)
            return True
    return False


@inner
def remove_all(ctx: int, row: int, unwanted: int) -> None:
    """Makes all slots in the set at `unwanted` no holders of the row's key. The row may be empty then: `rows.erase` it."""
    count = get_short(row + COUNT)
    if count & BITSET == 0:
        kept = 0
        for number in range(count):
            bit = get_short(row + HOLDERS + 2 * number)
            if not has_bit(unwanted, bit):
                put_short(row + HOLDERS + 2 * kept, bit)
                kept += 1
        put_short(row + COUNT, kept)
        return
    words = set_of(ctx, row)
    left = 0
    for offset in range(0, get(ctx + SET_WORDS) * 8, 8):
        word = get(words + offset) & ~get(unwanted + offset)
        put(words + offset, word)
        left += count_bits(word)
    put_short(row + COUNT, left | BITSET)
    if left <= FEW:
        collect(ctx, row)


@inner
def live(ctx: int, row: int) -> int:
    """How many holders of the row's key are not hidden."""
    count = get_short(row + COUNT)
    seen = get(ctx + LIVE)
    known = 0
    if count & BITSET == 0:
        for at in range(row + HOLDERS, row + HOLDERS + 2 * count, 2):
            if has_bit(seen, get_short(at)):
                known += 1
        return known
    words = set_of(ctx, row)
    for offset in range(0, get(ctx + SET_WORDS) * 8, 8):
        known += count_bits(get(words + offset) & get(seen + offset))
    return known


@inner
def _spill(ctx: int, row: int) -> None:
    """Moves the holders of a full row into a set."""
    number = _take_set(ctx)
    words = get(ctx + SETS) + number * get(ctx + SET_WORDS) * 8
    for at in range(row + HOLDERS, row + HOLDERS + 2 * INLINE, 2):
        flip_bit(words, get_short(at))
    put_short(row + COUNT, INLINE | BITSET)
    put(row + SET, number)


@inner
def collect(ctx: int, row: int) -> None:
    """Moves up to FEW holders of a row from its set into the row."""
    number = get(row + SET)
    words = set_of(ctx, row)
    count = 0
    for index in range(get(ctx + SET_WORDS)):
        word = get(words + 8 * index)
        while word != 0:
            put_short(row + HOLDERS + 2 * count, 64 * index + lowest_bit(word))
            count += 1
            word &= word - 1
    put_short(row + COUNT, count)
    _give_set(ctx, number)
