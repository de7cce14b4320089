"""The next token of every row of a step's logits.

Greedy rows take the highest logit, lowest id on ties. Sampled rows draw by inverse transform: one uniform number per
token, a pure function of (seed, choice, position), picks from the cumulative distribution of the tokens that top-k,
top-p and min-p leave, in id order. The same logits and counter give the same token whatever else is in the batch.

Logits are changed first by what the request asks for (`shaping`), then by what its constraint and its `min_tokens` rule out.
Filters apply in the order temperature, top-k, top-p, min-p, each to what the one before left.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b

import torch

from actors.request import Sampling
from actors.shaping import Shaper, shape

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row needs: the request's sampling, its choice index, the position of the new token.

    `shaper` and `mask` change the row before, `mask` by setting to minus infinity what may not come. `forbidden` may not come
    either, unless it is all that `mask` leaves: an answer that can only end does.
    """

    sampling: Sampling
    choice: int
    position: int
    forbidden: tuple[int, ...] = ()
    shaper: Shaper | None = None
    mask: Callable[[torch.Tensor], None] | None = None


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that belongs to this counter, with 53 random bits."""
    counter = struct.pack("<QQQ", seed % 2**64, choice, position)
    return (int.from_bytes(blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Seq[Draw]) -> list[int | None]:
    """One token id per row of float32 `logits` [rows, vocab]; None for a row that has no finite maximum.

    Mutates `logits` where rows are shaped or masked or ids forbidden.
    """
    shaped = [(row, draw.shaper) for row, draw in enumerate(draws) if draw.shaper is not None]
    if shaped:
        shape(logits, shaped)
    spared: dict[int, torch.Tensor] = {}
    for row, draw in enumerate(draws):
        if draw.mask is not None:
            draw.mask(logits[row])
        if draw.forbidden:
            ids = list(draw.forbidden)
            if draw.mask is not None:
                spared[row] = logits[row, ids]
            logits[row, ids] = _NEVER
    # max, not argmax: its index is documented to be the first of equal maxima, and it is faster in bfloat16.
    highest = logits.max(-1)
    usable: list[bool] = highest.values.isfinite().tolist()
    tokens: list[int | None] = highest.indices.tolist()
    for row, draw in enumerate(draws):
        if not usable[row] and row in spared:
            logits[row, list(draw.forbidden)] = spared[row]
            top = logits[row].max(-1)
            usable[row], tokens[row] = bool(top.values.isfinite()), int(top.indices)
        if not usable[row]:
            tokens[row] = None
        elif draw.sampling.temperature > 0:
            tokens[row] = _sample_row(logits[row], draw)
    return tokens


def _sample_row(logits: torch.Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    # The highest logit becomes 0 first, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.max()).double() / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    weights = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, ids = weights.sort(descending=True, stable=True)
        # A token stays while the mass before it is below top_p; the first always stays.
        outside = ordered.cumsum(0) - ordered >= sampling.top_p
        outside[0] = False
        weights = weights.index_fill(0, ids[outside], 0.0)
    if sampling.min_p > 0.0:
        weights = weights.masked_fill(weights < sampling.min_p * weights.max(), 0.0)
    mass = weights.cumsum(0)
    target = uniform(sampling.seed, draw.choice, draw.position) * float(mass[-1])
    index = int(torch.searchsorted(mass, torch.tensor(target, dtype=mass.dtype), right=True))
    return min(index, int(weights.nonzero()[-1]))
