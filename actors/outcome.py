"""What the logits of a step mean for its sequences: the next token, or an end without one.

A sequence ends without a token where its constraint has failed or finds the answer complete, where what the request rules out
is everything, or where the model gave no number to choose by. None of that touches the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from actors.errors import ReplicaFailed, RequestRefused
from actors.logprobs import Logprobs
from actors.request import TokenLogprob
from actors.sampler import sample
from actors.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Outcome:
    """For one sequence: `token`, with its `logprob` where the request asks; or None, then `failure` or a complete answer."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    failure: ReplicaFailed | RequestRefused | None = None


def outcomes(sequences: Seq[Sequence], logits: torch.Tensor) -> list[Outcome]:
    """One for each of `sequences`, which are ready, from its row of float32 `logits` [rows, vocab]. Mutates `logits`."""
    logprobs = Logprobs(logits, [sequence.request.sampling.logprobs for sequence in sequences])
    tokens = sample(logits, [sequence.draw() for sequence in sequences])
    return [
        _without_token(sequence, token) or Outcome(token, token if token is None else logprobs.of(row, token))
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
    ]


def _without_token(sequence: Sequence, token: int | None) -> Outcome | None:
    """How `sequence` ends without having `token`; None if it has it. A token None: no logit was a finite maximum."""
    constraint, shaper = sequence.constraint, sequence.shaper
    if constraint is not None:
        failure = constraint.failure
        if failure is not None or constraint.done:
            return Outcome(failure=failure)
    if token is not None:
        return None
    lists_tokens = shaper is not None and shaper.allowed is not None
    if constraint is not None or lists_tokens:
        param = "allowed_token_ids" if lists_tokens else "response_format"
        return Outcome(failure=RequestRefused("the request rules out every token that could come next", param))
    return Outcome(failure=ReplicaFailed("the model's logits have no finite maximum"))
