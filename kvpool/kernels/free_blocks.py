"""Taking blocks that are free, and giving blocks back.

Taking. First the local cache: up to four blocks that are LOCAL in our name, listed in our slot so that a death loses none.
Then the bitmap of free blocks, from our home on, lowest first, once around. A free bit is only a HINT: a block is ours
when the compare-and-swap of its state from FREE to MUTABLE succeeds. The bit is cleared after that, by whoever
succeeded; a bit whose block is not FREE is passed over.

Giving back. Four blocks stay in the local cache, the others become FREE, and then their bits are set, a word at a time.

A death in between leaves a block in the dead process's name (reclaim frees it), or FREE without its bit, or a bit without a
FREE block; the last two the tidy pass puts right. Every process has a home of its own in the bitmap, as far from the
others as possible, so that processes which do not fill the pool never meet.
"""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import fetch_and, fetch_or, get, load, lowest_bit, put, store, swap_if
from kvpool.kernels.context import (
    BIT,
    BITMAP_WORDS,
    CAPACITY,
    FILLED,
    FREE_BITS,
    HEADER,
    HELD,
    HOME,
    LABEL,
    LOCAL_COUNT,
    MINE,
    REACH,
    REFS,
    SLOT,
    STATE,
    TABLE_LABEL,
)
from kvpool.kernels.counting import tried
from kvpool.kernels.pause import FREED, PARKED, SEEN_FREE, TAKEN, TAKEN_LOCAL, pause
from kvpool.layout import HEADER_WORDS, LOCAL_CACHE_BLOCKS, SLOT_WORDS
from kvpool.words import FREE, GENERATION_MASK, GENERATION_SHIFT, LOCAL, MUTABLE, STATE_MASK

_DEMAND = 8 * HEADER_WORDS["demand"]
_LOCAL_CACHE = 8 * SLOT_WORDS["local_cache"]


@inner
def next_life(word: int) -> int:
    """The generation after that of `word`, in its place; without state and owner."""
    return ((word >> GENERATION_SHIFT) + 1 & GENERATION_MASK) << GENERATION_SHIFT


@inner
def same_life(word: int) -> int:
    """The generation of `word` in its place; without state and owner."""
    return word >> GENERATION_SHIFT << GENERATION_SHIFT


@inner
def hand_over(ctx: int, block: int, table: int) -> None:
    """`block`, which is MUTABLE and ours, is held by one request from now on, the one of `table`."""
    put(get(ctx + REFS) + 8 * block, 1)
    put(get(ctx + FILLED) + 8 * block, 0)
    label = get(ctx + LABEL) + 32 * block
    put(label, get(table + TABLE_LABEL))
    put(label + 8, get(table + TABLE_LABEL + 8))
    put(label + 16, get(table + TABLE_LABEL + 16))
    put(label + 24, get(table + TABLE_LABEL + 24))
    put(ctx + HELD, get(ctx + HELD) + 1)


@inner
def take_local(ctx: int, table: int, out: int, wanted: int) -> int:
    """Takes up to `wanted` blocks of the local cache into the list at `out`; how many."""
    taken = 0
    state, mine = get(ctx + STATE), get(ctx + MINE)
    cache = get(ctx + SLOT) + _LOCAL_CACHE
    left = get(ctx + LOCAL_COUNT)
    while left > 0 and taken < wanted:
        left -= 1
        block = get(cache + 8 * left) - 1
        word = load(state + 8 * block)
        store(state + 8 * block, same_life(word) | mine | MUTABLE)
        pause(ctx, TAKEN_LOCAL)
        store(cache + 8 * left, 0)
        put(ctx + LOCAL_COUNT, left)
        hand_over(ctx, block, table)
        put(out + 8 * taken, block)
        taken += 1
    return taken


@inner
def _take_words(ctx: int, table: int, out: int, wanted: int, first: int, last: int) -> int:
    """`take_free` over the bitmap words from `first` to before `last`."""
    state, bitmap, mine = get(ctx + STATE), get(ctx + FREE_BITS), get(ctx + MINE)
    taken = 0
    tries = 0
    for word_number in range(first, last):
        if taken == wanted:
            break
        bits = load(bitmap + 8 * word_number)
        got = 0
        while bits != 0 and taken < wanted:
            low = bits & -bits
            bits ^= low
            block = 64 * word_number + lowest_bit(low)
            word = load(state + 8 * block)
            if word & STATE_MASK != FREE:
                continue
            tries += 1
            pause(ctx, SEEN_FREE)
            if swap_if(state + 8 * block, word, same_life(word) | mine | MUTABLE):
                pause(ctx, TAKEN)
                hand_over(ctx, block, table)
                put(out + 8 * taken, block)
                taken += 1
                got |= low
        if got != 0:
            fetch_and(bitmap + 8 * word_number, ~got)
    tried(ctx, tries, tries - taken)
    return taken


@inner
def take_free(ctx: int, table: int, out: int, wanted: int) -> int:
    """Takes up to `wanted` free blocks into the list at `out`; how many."""
    words, home, reach = get(ctx + BITMAP_WORDS), get(ctx + HOME), get(ctx + REACH)
    first = home + reach
    taken = 0
    if first < words:
        taken = _take_words(ctx, table, out, wanted, first, words)
        first = words
    if taken < wanted and first < words + home:
        taken += _take_words(ctx, table, out + 8 * taken, wanted - taken, first - words, home)
    if taken < wanted and reach > 0:  # what others freed behind us
        middle = min(words, home + reach)
        taken += _take_words(ctx, table, out + 8 * taken, wanted - taken, home, middle)
        if taken < wanted and home + reach > words:
            taken += _take_words(ctx, table, out + 8 * taken, wanted - taken, 0, home + reach - words)
    if taken > 0:
        last = get(out + 8 * (taken - 1)) >> 6
        put(ctx + REACH, last - home if last >= home else last - home + words)
    return taken


@inner
def take_unlisted(ctx: int, table: int, out: int, wanted: int) -> int:
    """`take_free` by the states alone: finds free blocks whose bits were lost."""
    state, mine = get(ctx + STATE), get(ctx + MINE)
    taken = 0
    for block in range(get(ctx + CAPACITY)):
        if taken == wanted:
            break
        word = load(state + 8 * block)
        if word & STATE_MASK == FREE and swap_if(state + 8 * block, word, same_life(word) | mine | MUTABLE):
            fetch_and(get(ctx + FREE_BITS) + 8 * (block >> 6), ~(1 << (block & 63)))
            hand_over(ctx, block, table)
            put(out + 8 * taken, block)
            taken += 1
    return taken


@inner
def set_free_bits(ctx: int, word_number: int, bits: int) -> None:
    """Says that these blocks are FREE, and lets our search begin there again if it had passed."""
    fetch_or(get(ctx + FREE_BITS) + 8 * word_number, bits)
    home = get(ctx + HOME)
    distance = word_number - home if word_number >= home else word_number - home + get(ctx + BITMAP_WORDS)
    if distance < get(ctx + REACH):
        put(ctx + REACH, distance)


@inner
def others_wait(ctx: int) -> bool:
    """Whether another process waits for blocks, so that none should lie in our local cache."""
    return load(get(ctx + HEADER) + _DEMAND) & ~get(ctx + BIT) != 0


@inner
def park(ctx: int, block: int) -> bool:
    """Moves a block of ours that nobody holds any more into the local cache; False when that is full, or others wait."""
    left = get(ctx + LOCAL_COUNT)
    if left == LOCAL_CACHE_BLOCKS or others_wait(ctx):
        return False
    address = get(ctx + STATE) + 8 * block
    store(address, next_life(load(address)) | get(ctx + MINE) | LOCAL)
    pause(ctx, PARKED)
    store(get(ctx + SLOT) + _LOCAL_CACHE + 8 * left, block + 1)
    put(ctx + LOCAL_COUNT, left + 1)
    return True


@inner
def set_free(ctx: int, block: int) -> None:
    """Makes a block of ours FREE. Its bit is still to be set."""
    address = get(ctx + STATE) + 8 * block
    store(address, next_life(load(address)) | FREE)
    pause(ctx, FREED)


@inner
def flush_local(ctx: int) -> int:
    """Makes the blocks of the local cache free for all; how many."""
    cache = get(ctx + SLOT) + _LOCAL_CACHE
    count = get(ctx + LOCAL_COUNT)
    for place in range(count - 1, -1, -1):
        block = get(cache + 8 * place) - 1
        set_free(ctx, block)
        set_free_bits(ctx, block >> 6, 1 << (block & 63))
        store(cache + 8 * place, 0)
        put(ctx + LOCAL_COUNT, place)
    return count
