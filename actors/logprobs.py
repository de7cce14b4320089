"""How likely the model thought a token, and which it thought likelier: for requests that ask.

Of the logits as the model gives them: before temperature, biases, penalties and grammars. So they have to be taken before
`sampler.sample`, which changes logits in place. Rows that nobody asks about are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from actors.request import TokenLogprob

LEAST = -9999.0
"""Instead of minus infinity, which JSON does not have."""


class Logprobs:
    """Of one step. `wanted`: for each row of `logits` [rows, vocab] the number of alternatives, or None."""

    def __init__(self, logits: torch.Tensor, wanted: Seq[int | None]) -> None:
        self._counts = {row: count for row, count in enumerate(wanted) if count is not None}
        # Row by row, so that what a row gets depends on nothing else in the batch.
        self._rows = {row: _logprobs(logits[row]) for row in self._counts}

    def of(self, row: int, token: int) -> TokenLogprob | None:
        """What the request of `row`, to which `token` has come, is to be told; None if it did not ask."""
        logprobs = self._rows.get(row)
        if logprobs is None:
            return None
        return TokenLogprob(float(logprobs[token]), _likeliest(logprobs, self._counts[row]))


@torch.inference_mode()
def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).clamp_(min=LEAST)


@torch.inference_mode()
def _likeliest(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest (id, logprob), first the likeliest, the lower id of equals."""
    count = min(count, logprobs.numel())
    if not count:
        return ()
    values, ids = logprobs.topk(min(count + 1, logprobs.numel()))
    if len(values) > count and values[count] == values[count - 1]:
        # topk takes any of equals, so here it only tells from where on to look.
        ids = (logprobs >= values[count - 1]).nonzero().squeeze(-1)
    ids = ids.sort().values
    ordered, places = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[places[:count]].tolist(), ordered[:count].tolist(), strict=True))
