"""The online softmax of a prompt's chunk, on vectors: 16 queries beside each other, so that nothing is summed across a vector.

Scores are in powers of two, times log2 e; the sums so far shrink to what they are beside each new highest score (Milakov and
Gimelshein, 2018). All is float32 but the weights, which are rounded to bfloat16, as everybody's are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from actors.lanes import bounded, fill, fma, keep, larger, load, power, store, store_narrow, store_pairs, transpose
from kvpool.compiled import inner

QUERIES: Final = 16
STRIP: Final = 256
"""Keys weighed at a time. Strips begin at multiples of that: so a query's sums do not depend on its neighbours."""
KEYS: Final = 32
"""Scores and weights of a strip are filled up to multiples of so many keys, with such as nobody sees."""
SCORE_BYTES: Final = 4 * QUERIES * STRIP
WEIGHT_BYTES: Final = 2 * QUERIES * STRIP
"""Of 16 queries, for a strip: [keys, 16] float32, and [keys / 2, 16, 2] bfloat16."""
LOWEST: Final = np.float32(-3.4e38)
_LOG2_E: Final = np.float32(1.4426950408889634)


@inner
def scale_scores(scores: Any, keys: int, ahead: int, window: int, scale: Any, softcap: Any) -> None:
    """Scores, as they count, in powers of 2: of `keys` the first of which is `ahead` of the first query.

    What a query may not see, and what is missing of the last tile, becomes `LOWEST`.
    """
    zero, log2_e, hidden = fill(np.float32(0.0)), fill(_LOG2_E), fill(LOWEST)
    base = scale if softcap > 0.0 else fma(scale, log2_e, zero)
    for row in range(keys):
        score = fma(load(scores, 16 * row), base, zero)
        if softcap > 0.0:
            score = fma(bounded(score, softcap), log2_e, zero)
        # Query n sees the key where ahead <= n, and where n < ahead + window.
        if ahead > 0 or (window > 0 and ahead + window < QUERIES):
            score = keep(score, max(ahead, 0), ahead + window if window > 0 else QUERIES, LOWEST)
        store(scores, 16 * row, score)
        ahead += 1
    for row in range(keys, (keys + KEYS - 1) // KEYS * KEYS):
        store(scores, 16 * row, hidden)


@inner
def _highest(scores: Any, rows: int, highest: Any) -> Any:
    """The highest score of each query, and `highest`. Four at a time, because one has to wait for the other."""
    a, b, c, d = highest, highest, highest, highest
    for at in range(0, 16 * rows, 64):
        a, b = larger(load(scores, at), a), larger(load(scores, at + 16), b)
        c, d = larger(load(scores, at + 32), c), larger(load(scores, at + 48), d)
    return larger(larger(a, b), larger(c, d))


@inner
def weigh(scores: Any, rows: int, weights: Any, state: Any, sums: Any) -> None:
    """Weights of 16 queries from their scores of a strip, `rows` keys.

    `state` are 16 times the highest score so far, and 16 times the sum of the weights so far. It, and the `sums` so far, shrink
    to what they are beside the new highest: not at all where that is the old one.
    """
    one, minus = fill(np.float32(1.0)), fill(np.float32(-1.0))
    before = load(state, 0)
    highest = _highest(scores, rows, before)
    shrink = power(fma(highest, minus, before))
    evens, odds = fill(np.float32(0.0)), fill(np.float32(0.0))
    for at in range(0, 16 * rows, 32):
        even = power(fma(highest, minus, load(scores, at)))
        odd = power(fma(highest, minus, load(scores, at + 16)))
        evens, odds = fma(even, one, evens), fma(odd, one, odds)
        store_pairs(weights, at, even, odd)
    store(state, 0, highest)
    store(state, 16, fma(load(state, 16), shrink, fma(evens, one, odds)))
    for at in range(0, sums.size, 16):
        store(sums, at, fma(load(sums, at), shrink, fill(np.float32(0.0))))


@inner
def give(sums: Any, state: Any, head_dim: int, out: Any, at: int, stride: int, count: int) -> None:
    """What `count` queries get, from the sums of all 16, which it spoils, to `out` at `at`, `stride` elements apart."""
    for d in range(0, head_dim, 16):
        transpose(sums, 16 * d)
        for n in range(count):
            share = fill(np.float32(1.0) / state[16 + n])
            store_narrow(out, at + n * stride + d, fma(load(sums, 16 * (d + n)), share, fill(np.float32(0.0))))
