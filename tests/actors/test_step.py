"""The layout of one forward pass."""

from __future__ import annotations

from actors.step import Piece, build_step


def test_single_tokens_come_first_and_rows_know_their_piece() -> None:
    pieces = [
        Piece([5, 6, 7], 2, [9, 3], True),
        Piece([8], 4, [1, 2], True),
        Piece([4, 4], 0, [6], False),
        Piece([3], 0, [7], True),
    ]
    step = build_step(pieces, 4)
    assert step.input_ids.tolist() == [[8, 3, 5, 6, 7, 4, 4]]
    assert step.position_ids.tolist() == [[4, 0, 2, 3, 4, 0, 1]]
    assert step.slot_blocks.tolist() == [2, 7, 9, 9, 3, 6, 6]
    assert step.slot_offsets.tolist() == [0, 0, 2, 3, 0, 0, 1]
    assert step.singles == 2
    assert step.lengths.tolist() == [5, 1]
    assert step.tables.tolist() == [[1, 2], [7, 0]]
    assert [(chunk.first, chunk.count, chunk.start) for chunk in step.chunks] == [(2, 3, 2), (5, 2, 0)]
    assert step.order == [1, 3, 0]
    assert step.logits_index.tolist() == [0, 1, 4]


def test_a_step_of_chunks_only() -> None:
    step = build_step([Piece([1, 2], 0, [0], False)], 4)
    assert step.singles == 0
    assert step.logits_index.tolist() == []
