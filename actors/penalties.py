"""Penalties for tokens that a sequence has had already.

In the order vLLM and most others use: the repetition penalty divides a positive logit and multiplies a negative one, of every
token of prompt and answer; then each token of the answer loses `frequency_penalty` for each time and `presence_penalty`
once. All of it is elementwise float32, so a row comes out the same whatever else is in the batch.

A sequence keeps its distinct tokens and their counts, so a step costs what it has had, not the vocabulary; all rows of
a step are changed together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from actors.request import Sampling


class Seen:
    """The distinct tokens of one sequence that its penalties are about, and how often each was generated.

    The tokens of the prompt are among them, with count 0, only where `repetition_penalty` is on.
    """

    def __init__(self, sampling: Sampling, prompt: Seq[int]) -> None:
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.repetition = sampling.repetition_penalty
        self._known = len(prompt)
        first = np.unique(np.asarray(prompt if self.repetition != 1.0 else (), np.int64))
        self._place = dict(zip(first.tolist(), range(len(first)), strict=True))
        self._ids = first
        self._counts = np.zeros(len(first), np.float32)

    @classmethod
    def of(cls, sampling: Sampling, prompt: Seq[int]) -> Seen | None:
        """None where no penalty is on."""
        off = not sampling.presence_penalty and not sampling.frequency_penalty and sampling.repetition_penalty == 1.0
        return None if off else cls(sampling, prompt)

    def catch_up(self, tokens: Seq[int]) -> None:
        """Count what was generated since the last call. `tokens` is prompt + answer, and never gets shorter."""
        for token in tokens[self._known :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                more = max(64, place)  # doubling, so that n tokens cost n steps
                self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
            self._ids[place] = token
            self._counts[place] += 1
        self._known = len(tokens)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens, in no order that matters. A view, as `counts`."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was generated."""
        return self._counts[: len(self._place)]


def penalise(logits: torch.Tensor, rows: Seq[tuple[int, Seen]]) -> None:
    """Apply the penalties of each (row, tokens of its sequence) to `logits` [rows, vocab], in place."""
    sizes = [len(seen.ids) for _, seen in rows]
    if not any(sizes):
        return

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), sizes)).to(logits.device)

    at = (
        torch.from_numpy(np.repeat([row for row, _ in rows], sizes)).to(logits.device),
        torch.from_numpy(np.concatenate([seen.ids for _, seen in rows])).to(logits.device),
    )
    counts = torch.from_numpy(np.concatenate([seen.counts for _, seen in rows])).to(logits.device)
    values = logits[at]
    repetition = spread([seen.repetition for _, seen in rows])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * spread([seen.frequency for _, seen in rows])
    values -= (counts > 0) * spread([seen.presence for _, seen in rows])
    logits[at] = values
