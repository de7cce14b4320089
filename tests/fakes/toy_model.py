"""A model whose next token is a hash of every token it reads back through the block table.

It keeps token ids where a real model keeps K and V. One wrong, stale or foreign block anywhere in a prefix changes its
output, so comparing with `continuation` proves that scheduler and pool gave each request the right blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import torch

from actors.step import Piece


class ToyModel:
    """Deterministic model over `blocks` blocks of `block_tokens` tokens. `before_step` runs first in every forward."""

    def __init__(self, blocks: int, block_tokens: int, vocab_size: int, eos: tuple[int, ...] = ()) -> None:
        self.memory = np.full((blocks, block_tokens), -1, np.int64)
        self.block_tokens = block_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = eos
        self.computed_tokens = 0
        self.steps = 0
        self.before_step: Callable[[list[Piece]], None] = lambda pieces: None

    @torch.inference_mode()
    def forward(self, pieces: list[Piece]) -> tuple[torch.Tensor, list[int]]:
        """See `actors.engine.TokenModel`."""
        self.before_step(pieces)
        self.steps += 1
        order = [index for index, piece in enumerate(pieces) if piece.wants_logits]
        for piece in pieces:
            self.computed_tokens += len(piece.tokens)
            for offset, token in enumerate(piece.tokens):
                position = piece.start + offset
                self.memory[piece.blocks[position // self.block_tokens], position % self.block_tokens] = token
        logits = torch.zeros(len(order), self.vocab_size)
        for row, index in enumerate(order):
            piece = pieces[index]
            end = piece.start + len(piece.tokens)
            seen = [int(self.memory[piece.blocks[p // self.block_tokens], p % self.block_tokens]) for p in range(end)]
            logits[row, next_token(seen, self.vocab_size)] = 1.0
        return logits, order

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's contents."""
        self.memory[target] = self.memory[source]


def next_token(tokens: Sequence[int], vocab_size: int) -> int:
    """What the model says after `tokens`."""
    return crc32(np.asarray(tokens, np.int64).tobytes()) % vocab_size


def continuation(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]
