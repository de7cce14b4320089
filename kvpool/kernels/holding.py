"""Holding an indexed block, and letting go of it.

How many requests of this process hold a block is private (`REFS`). The first one sets our bit in the holder word, the last
one clears it.

Hold FIRST, then verify: our bit is set, and only then it counts whether the block is still INDEXED in the life it had when
we looked. An evictor sets EVICTING first and looks at the holders then, so it sees our bit and puts the block back, or
we see EVICTING. We wait for it to decide by looking `LOOKS` times; if it has not by then (it may be stopped, or dead), we take
the bit back and call it a miss. Whatever else is compared (key, parent, tokens) is compared after that, on a block that
cannot change.

A block that we hold and that reads EVICTING is as good as INDEXED: the evictor is about to see our bit.
"""

from __future__ import annotations

from kvpool.compiled import inner
from kvpool.kernels.atomics import fetch_and, fetch_or, get, get_half, load, put
from kvpool.kernels.context import (
    BIT,
    BLOCK_TOKENS,
    HELD,
    HOLDERS,
    KEY,
    LAST_USE,
    MINE,
    PARENT,
    REFS,
    STATE,
    TOKENS,
)
from kvpool.kernels.counting import (
    EVICTED_WHILE_HELD,
    HASH_COLLISIONS,
    PEAK_HOLDERS,
    REUSE_GAP,
    bucket_of,
    count,
    count_peak,
    observe,
    tried,
)
from kvpool.kernels.free_blocks import park, same_life, set_free, set_free_bits
from kvpool.kernels.index import NOT_FOUND, find
from kvpool.kernels.pause import FOUND, LET_GO, TOUCHED, pause
from kvpool.words import EVICTING, INDEXED, OWNER_SHIFT, PARENT_MASK, STATE_MASK

LOOKS = 64
"""How often a holder looks at a block that is being evicted before it goes on without it."""
NOT_HELD = -1
MOVING = -2
COLLIDES = -3
GAP_BIT = 32
BLOCK_MASK = 0xFFFFFFFF
_OWNER_FIELD = 0xFF << OWNER_SHIFT


@inner
def is_indexed(word: int) -> bool:
    """Whether the state word of a block that somebody holds says that it can be matched."""
    state = word & STATE_MASK
    return state in (INDEXED, EVICTING)


@inner
def is_ours(ctx: int, word: int) -> bool:
    """Whether the block of this state word belongs to our slot."""
    return word & _OWNER_FIELD == get(ctx + MINE)


@inner
def hold(ctx: int, block: int, now: int) -> int:
    """One more request of ours holds `block`, if it is INDEXED; NOT_HELD, with nothing changed, if it is not, or may not be.

    0, or 1 + the bucket of the time that nobody held it: counting that here would cost as much as the rest.
    """
    refs = get(ctx + REFS) + 8 * block
    held = get(refs)
    if held > 0:
        put(refs, held + 1)
        count_peak(ctx, PEAK_HOLDERS, held + 1)
        return 0
    address = get(ctx + STATE) + 8 * block
    word = load(address)
    if not is_indexed(word):
        return NOT_HELD
    pause(ctx, FOUND)
    bit = get(ctx + BIT)
    before = fetch_or(get(ctx + HOLDERS) + 8 * block, bit)
    pause(ctx, TOUCHED)
    wanted = same_life(word) | INDEXED
    looks = 0
    while looks < LOOKS:
        word = load(address)
        if word == wanted or word & STATE_MASK != EVICTING or same_life(word) | INDEXED != wanted:
            break
        looks += 1
    if looks > 0:
        tried(ctx, 1, looks)
    if word != wanted:
        fetch_and(get(ctx + HOLDERS) + 8 * block, ~bit)
        return NOT_HELD
    put(refs, 1)
    put(ctx + HELD, get(ctx + HELD) + 1)
    return 0 if before != 0 else 1 + bucket_of(now - get(get(ctx + LAST_USE) + 8 * block))


@inner
def loosen(ctx: int, block: int, now: int) -> bool:
    """One request of ours lets go of `block`. The last one makes it idle, or gives it back if it is not in the index. True
    when it is FREE now: its bit is the caller's to set.
    """
    refs = get(ctx + REFS) + 8 * block
    left = get(refs) - 1
    put(refs, left)
    if left > 0:
        return False
    put(ctx + HELD, get(ctx + HELD) - 1)
    word = load(get(ctx + STATE) + 8 * block)
    if not is_indexed(word):
        if is_ours(ctx, word):
            if park(ctx, block):
                return False
            set_free(ctx, block)
            return True
        count(ctx, EVICTED_WHILE_HELD, 1)  # by what the rules above exclude
    put(get(ctx + LAST_USE) + 8 * block, now)
    fetch_and(get(ctx + HOLDERS) + 8 * block, ~get(ctx + BIT))
    pause(ctx, LET_GO)
    return False


@inner
def let_go(ctx: int, block: int, now: int) -> None:
    """One request of ours lets go of `block`."""
    if loosen(ctx, block, now):
        set_free_bits(ctx, block >> 6, 1 << (block & 63))


@inner
def let_go_all(ctx: int, blocks: int, number: int, now: int) -> None:
    """One request of ours lets go of the `number` blocks listed at `blocks`, the last one first."""
    word_number, bits = 0, 0
    for place in range(number - 1, -1, -1):
        block = get(blocks + 8 * place)
        if loosen(ctx, block, now):
            if block >> 6 != word_number and bits != 0:
                set_free_bits(ctx, word_number, bits)
                bits = 0
            word_number = block >> 6
            bits |= 1 << (block & 63)
    if bits != 0:
        set_free_bits(ctx, word_number, bits)


@inner
def _same_tokens(ctx: int, block: int, tokens: int) -> bool:
    size = get(ctx + BLOCK_TOKENS)
    stored = get(ctx + TOKENS) + 4 * size * block
    for place in range(size):
        if get_half(stored + 4 * place) != get_half(tokens + 4 * place):
            return False
    return True


@inner
def hold_verified(ctx: int, first: int, second: int, previous: int, tokens: int, now: int) -> int:
    """Holds the indexed block with the key (first, second) that follows block `previous` (NOT_FOUND: that begins a
    sequence) and has the token ids at `tokens` (0: any).

    The block in the low half, what `hold` says from GAP_BIT on; or NOT_FOUND; or MOVING, when one is entered but cannot
    be held now; or COLLIDES, counted, when it has another parent or other tokens.
    """
    block = find(ctx, first, second)
    if block == NOT_FOUND:
        return NOT_FOUND
    gap = hold(ctx, block, now)
    if gap == NOT_HELD:
        return MOVING
    last_use = get(ctx + LAST_USE) + 8 * block
    key = get(ctx + KEY) + 16 * block
    outcome = MOVING
    if get(key) == first and get(key + 8) == second:
        parent = (get(get(ctx + PARENT) + 8 * block) & PARENT_MASK) - 1
        if parent == previous and (tokens == 0 or _same_tokens(ctx, block, tokens)):
            put(last_use, now)
            return gap << GAP_BIT | block
        count(ctx, HASH_COLLISIONS, 1)
        outcome = COLLIDES
    let_go(ctx, block, get(last_use))
    return outcome


@inner
def count_gaps(ctx: int, gap: int, times: int) -> None:
    """Counts what `hold` said `times` times."""
    if gap > 0:
        observe(ctx, REUSE_GAP, gap - 1, times)


@inner
def block_of(ctx: int, held: int) -> int:
    """The block of a `hold_verified` that succeeded, whose gap is counted here."""
    count_gaps(ctx, held >> GAP_BIT, 1)
    return held & BLOCK_MASK
