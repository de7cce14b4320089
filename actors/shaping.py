"""What one request changes about its logits before a token is chosen: biases, penalties, the only tokens allowed.

Biases come first, then penalties (so a penalty divides what a bias has raised), then all but the allowed tokens are ruled
out. The index tensors are made once for a sequence. Rows that change nothing have no shaper and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from actors.penalties import Seen, penalise
from actors.request import Sampling


@dataclass(slots=True, eq=False)
class Shaper:
    """Of one sequence. `bias_ids` and `bias` belong together; `allowed` are ids; any of the three may be missing."""

    bias_ids: torch.Tensor | None
    bias: torch.Tensor | None
    allowed: torch.Tensor | None
    seen: Seen | None

    @classmethod
    def of(cls, sampling: Sampling, prompt: Seq[int]) -> Shaper | None:
        """None where the request changes nothing. Biases of one id that is named twice add up."""
        seen = Seen.of(sampling, prompt)
        if not (sampling.logit_bias or sampling.allowed_token_ids or seen):
            return None
        biases: dict[int, float] = {}
        for token, bias in sampling.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        allowed = sorted(set(sampling.allowed_token_ids))
        return cls(
            torch.tensor(list(biases)) if biases else None,
            torch.tensor(list(biases.values()), dtype=torch.float32) if biases else None,
            torch.tensor(allowed) if allowed else None,
            seen,
        )

    def settle(self, device: torch.device) -> None:
        """Move the tensors to `device`, once."""
        if self.bias_ids is not None and self.bias is not None:
            self.bias_ids, self.bias = self.bias_ids.to(device), self.bias.to(device)
        if self.allowed is not None:
            self.allowed = self.allowed.to(device)


def shape(logits: torch.Tensor, rows: Seq[tuple[int, Shaper]]) -> None:
    """Change `logits` [rows, vocab] in place as the shaper of each (row, shaper) wants it."""
    for row, shaper in rows:
        shaper.settle(logits.device)
        if shaper.bias_ids is not None and shaper.bias is not None:
            logits[row].index_add_(0, shaper.bias_ids, shaper.bias)
    penalised = [(row, shaper.seen) for row, shaper in rows if shaper.seen is not None]
    if penalised:
        penalise(logits, penalised)
    for row, shaper in rows:
        if shaper.allowed is not None:
            kept = logits[row, shaper.allowed]
            logits[row] = float("-inf")
            logits[row, shaper.allowed] = kept
