"""What an engine can never compute, told before anything is queued.

The HTTP edge checks the form of a request; here is what only the model and the pool know, and what would harm others of the
same step: ids outside the vocabulary, numbers that are none, more tokens than the pool has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from actors.errors import RequestRefused
from actors.request import GenerateRequest, Sampling


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Of one engine. `eos`: the model's own ends; `context_tokens`: the longest prompt + answer; `capacity_blocks` of
    `block_tokens`: the pool.
    """

    vocab_size: int
    eos: frozenset[int]
    context_tokens: int
    block_tokens: int
    capacity_blocks: int

    def check(self, request: GenerateRequest) -> None:
        """Raises `RequestRefused` with the field at fault."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt:
            raise RequestRefused("the prompt is empty", "prompt")
        if len(prompt) >= self.context_tokens:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens, but the longest prompt + output is {self.context_tokens} tokens",
                "prompt",
                "context_length_exceeded",
            )
        self._known(prompt, "prompt")
        self._known(sampling.stop_token_ids, "stop_token_ids")
        self._known(sampling.allowed_token_ids, "allowed_token_ids")
        self._known((token for token, _ in sampling.logit_bias), "logit_bias")
        self._numbers(sampling)
        self._possible(sampling)
        if sampling.max_tokens < 1:
            raise RequestRefused("max_tokens must be at least 1", "max_tokens")
        total = min(len(prompt) + sampling.max_tokens, self.context_tokens)
        needed = -(-total // self.block_tokens)
        if needed > self.capacity_blocks:
            raise RequestRefused(
                f"prompt + max_tokens need {needed} blocks, but the whole pool has {self.capacity_blocks} "
                f"({self.capacity_blocks * self.block_tokens} tokens); "
                "ask for fewer tokens or serve with a larger pool.tokens",
                "max_tokens",
                "context_length_exceeded",
            )

    def _known(self, tokens: Iterable[int], field: str) -> None:
        tokens = tuple(tokens)
        if tokens and (min(tokens) < 0 or max(tokens) >= self.vocab_size):
            raise RequestRefused(f"token ids must be in [0, {self.vocab_size})", field)

    def _possible(self, sampling: Sampling) -> None:
        """Whether there is a first token at all, as far as that is known without the model."""
        if sampling.min_tokens < 1:
            return
        ends = set(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos)
        if all(token in ends for token in sampling.allowed_token_ids or range(self.vocab_size)):
            raise RequestRefused(
                "min_tokens forbids an end, but every token that may come is one; allow others, or set min_tokens to 0",
                "min_tokens",
            )

    def _numbers(self, sampling: Sampling) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(sampling, field)):
                raise RequestRefused(f"{field} must be a finite number", field)
        if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
            raise RequestRefused("repetition_penalty must be a finite number above 0", "repetition_penalty")
        if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
            raise RequestRefused("the values of logit_bias must be finite numbers", "logit_bias")
        if sampling.logprobs is not None and not 0 <= sampling.logprobs <= self.vocab_size:
            raise RequestRefused(f"logprobs must be in [0, {self.vocab_size}]", "logprobs")
