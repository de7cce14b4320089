"""One step's tokens, laid out for one forward pass.

All sequences of a step are flattened into one row of tokens: first every sequence that computes exactly one token (the
decode kernel serves those), then the prompt chunks in order. A token is written to `slot_blocks[i]`, row
`slot_offsets[i]`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """`tokens` of one sequence, at positions `start` onwards, over the sequence's `blocks` (logical order)."""

    tokens: Seq[int]
    start: int
    blocks: Seq[int]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens [first, first + count) of the step are positions [start, start + count) of one sequence."""

    first: int
    count: int
    start: int
    blocks: torch.Tensor


@dataclass(slots=True)
class StepBatch:
    """Arrays of one forward pass over T tokens, in R >= T rows.

    `input_ids`, `position_ids` int64 [1, R]; `slot_blocks`, `slot_offsets` int64 [T]; `tables` int64 [singles, blocks],
    `lengths` int64 [singles]; `logits_index` int64 [rows]. `order[r]` is the index, in the pieces given, of logits row
    r. `masks` memoises attention masks across the layers of this step.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slot_blocks: Int64Array
    slot_offsets: Int64Array
    tables: Int64Array
    lengths: Int64Array
    chunks: list[PromptChunk]
    logits_index: torch.Tensor
    order: list[int]
    told: array[int]
    """What compiled kernels are told of the step: see `fused_kernels.py`."""
    masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def singles(self) -> int:
        """How many leading tokens are decode queries."""
        return int(self.lengths.shape[0])


def build_step(
    pieces: Seq[Piece],
    block_tokens: int,
    rows: Callable[[int], int] = lambda tokens: tokens,
    *,
    one_by_one: bool = False,
) -> StepBatch:
    """Lay out `pieces` for one forward pass. Every position of a piece must have its block already.

    `rows` says how many rows so many tokens take; what is filled up is at the end, and has no slot. `one_by_one`: the tokens of
    a chunk, too, are decode queries, each of which sees those before it.
    """
    by_kind = sorted(range(len(pieces)), key=lambda index: len(pieces[index].tokens) != 1)
    total = sum(len(piece.tokens) for piece in pieces)
    ids = np.zeros(rows(total), np.int64)
    positions = np.zeros(rows(total), np.int64)
    slots = np.empty(total, np.int64)
    singles = [pieces[index] for index in by_kind if one_by_one or len(pieces[index].tokens) == 1]
    widest = max((len(piece.blocks) for piece in singles), default=0)
    decoded = sum(len(piece.tokens) for piece in singles)
    tables = np.zeros((decoded, widest), np.int64)
    chunks: list[PromptChunk] = []
    logits_rows: list[int] = []
    order: list[int] = []
    first = 0
    for index in by_kind:
        piece = pieces[index]
        count = len(piece.tokens)
        here = slice(first, first + count)
        blocks = np.asarray(piece.blocks, np.int64)
        ids[here] = piece.tokens
        positions[here] = np.arange(piece.start, piece.start + count)
        slots[here] = blocks[positions[here] // block_tokens]
        if one_by_one or count == 1:
            tables[here, : len(blocks)] = blocks
        else:
            chunks.append(PromptChunk(first, count, piece.start, torch.from_numpy(blocks)))
        if piece.wants_logits:
            logits_rows.append(first + count - 1)
            order.append(index)
        first += count
    offsets = positions[:total] % block_tokens
    lengths = positions[:decoded] + 1
    return StepBatch(
        input_ids=torch.from_numpy(ids).unsqueeze(0),
        position_ids=torch.from_numpy(positions).unsqueeze(0),
        slot_blocks=slots,
        slot_offsets=offsets,
        tables=tables,
        lengths=lengths,
        chunks=chunks,
        logits_index=torch.tensor(logits_rows, dtype=torch.int64),
        order=order,
        told=array("q", (slots.ctypes.data, offsets.ctypes.data, tables.ctypes.data, widest, lengths.ctypes.data)),
    )
